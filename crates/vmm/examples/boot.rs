//! Boots a kernel and shows its console: `boot KERNEL [INITRAMFS] [--cpus N] [--mib N] [--cmdline TEXT]`.
//!
//! Without disks, network or agent: for trying a kernel, and for looking at the machine itself.

use std::fs::File;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dormouse_snapshot::devices::x86::PowerState;
use dormouse_vmm::arch::x86_64::boot::{self, BootSource};
use dormouse_vmm::arch::x86_64::cpuid::{self, CpuTemplate};
use dormouse_vmm::arch::x86_64::{layout, power};
use dormouse_vmm::ending::Ending;
use dormouse_vmm::memory;
use dormouse_vmm::serial::{ConsoleLog, SerialPort};
use dormouse_vmm::vcpu::{Machine, VcpuSet};
use dormouse_vmm::vm::{Vm, open_kvm};
use dormouse_vmm::{Bus, GuestMemory};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

type Failure = Box<dyn std::error::Error>;

struct Options {
    kernel: String,
    initramfs: Option<String>,
    cpus: usize,
    mib: u64,
    cmdline: String,
    seconds_max: u64,
}

fn options() -> Result<Options, Failure> {
    let mut options = Options {
        kernel: String::new(),
        initramfs: None,
        cpus: 1,
        mib: 256,
        cmdline: "console=ttyS0 panic=-1 reboot=k".into(),
        seconds_max: 120,
    };
    let mut args = std::env::args().skip(1);
    let mut files = Vec::new();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--cpus" => options.cpus = value()?.parse()?,
            "--mib" => options.mib = value()?.parse()?,
            "--cmdline" => options.cmdline = value()?,
            "--seconds" => options.seconds_max = value()?.parse()?,
            _ => files.push(arg),
        }
    }
    let mut files = files.into_iter();
    options.kernel = files.next().ok_or("which kernel?")?;
    options.initramfs = files.next();
    Ok(options)
}

fn load(memory: &GuestMemory, options: &Options) -> Result<u64, Failure> {
    let kernel = File::open(&options.kernel)?;
    let initramfs = options.initramfs.as_ref().map(File::open).transpose()?;
    let source = BootSource {
        kernel: &kernel,
        initramfs: initramfs.as_ref(),
        cmdline: &options.cmdline,
        vcpus: options.cpus,
        virtio_slots: 0,
    };
    Ok(boot::load(memory, &source)?)
}

fn main() -> Result<(), Failure> {
    let options = options()?;
    let start = Instant::now();
    let kvm = open_kvm()?;
    let vm = Vm::new(&kvm, memory::anonymous(options.mib)?)?;
    let entry = load(vm.memory(), &options)?;
    let fds = vm.create_vcpus(options.cpus)?;
    boot::set_up_vcpus(&fds, &cpuid::supported(&kvm, CpuTemplate::Host)?, entry)?;

    let ending = Arc::new(Ending::new()?);
    let mut ports = Bus::new();
    power::attach(&mut ports, &ending, PowerState::default())?;
    let line = EventFd::new(EFD_CLOEXEC)?;
    vm.connect_interrupt(&line, layout::COM1_IRQ)?;
    let console = ConsoleLog::new(None, Some(File::options().write(true).open("/dev/stdout")?))?;
    let serial = Arc::new(Mutex::new(SerialPort::new(line, console)));
    ports.insert(layout::COM1_BASE.into(), 8, serial)?;

    let machine = Machine { mmio: Arc::new(Bus::new()), ports: Arc::new(ports), ending: ending.clone() };
    let vcpus = VcpuSet::start(fds, &machine)?;
    vcpus.resume();
    while ending.reason().is_none() && start.elapsed() < Duration::from_secs(options.seconds_max) {
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("\n[{:.1} s, {} exits]", start.elapsed().as_secs_f64(), vcpus.exits());
    vcpus.stop()?;
    match ending.reason() {
        Some(reason) => println!("[{}: {reason}]", reason.code()),
        None => println!("[still running: stopped]"),
    }
    Ok(())
}
