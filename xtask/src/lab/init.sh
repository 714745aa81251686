#!/bin/sh
# Process 1 of the lab: mounts, modules, the command, its exit code, power off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM=dumb
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o mode=755 run /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr

off() {
    sync
    echo o >/proc/sysrq-trigger
    while :; do sleep 1; done
}

# Bytes arrive here all the time, so that no lost timer interrupt stops the machine: they are dropped.
stty -echo -icanon </dev/console
cat </dev/console >/dev/null 2>&1 &

for module in virtio_pci virtio_console virtio_net tun vhost_vsock overlay; do modprobe $module; done
modprobe kvm_amd npt=1 nested=1 || echo "lab: kvm_amd cannot be loaded"
chmod 666 /dev/kvm

port() {
    for entry in /sys/class/virtio-ports/*; do
        if [ "$(cat $entry/name)" = "$1" ]; then
            echo /dev/${entry##*/}
            return
        fi
    done
}
control=$(port lab.control)
[ -n "$control" ] || { echo "lab: there is no control port"; off; }

hostname lab
ip link set lo up
ip address add 10.0.2.15/24 dev eth0
ip link set eth0 up
ip route add default via 10.0.2.2
rm -f /etc/resolv.conf
echo nameserver 10.0.2.3 >/etc/resolv.conf
date -s "@$(sed 's/.*lab.time=\([0-9]*\).*/\1/' /proc/cmdline)" >/dev/null

mkdir -p /out /lab
mount /dev/nvme1n1 /lab || { echo "lab: the disk with the programs cannot be mounted"; off; }
while read -r name path; do
    if [ -d "/lab/$name" ]; then
        mkdir -p "$path"
    else
        mkdir -p "${path%/*}"
        : >>"$path"
    fi
    mount --bind "/lab/$name" "$path"
done </lab/binds

mkfifo /run/lab.out /run/lab.err
cat /run/lab.out >"$(port lab.out)" &
out=$!
cat /run/lab.err >"$(port lab.err)" &
err=$!
echo "up $(cut -d' ' -f1 /proc/uptime)" >"$control"
setsid sh /lab/command </dev/null >/run/lab.out 2>/run/lab.err
code=$?
# What the command left running may hold its output open: it is not waited for.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    kill -0 $out 2>/dev/null || kill -0 $err 2>/dev/null || break
    sleep 0.1
done
if [ -n "$(ls -A /out)" ]; then
    tar -C /out -cf "$(port lab.files)" .
fi
echo "exit $code" >"$control"
off
