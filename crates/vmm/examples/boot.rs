//! Boots a kernel and shows its console, for trying a kernel and for looking at the machine itself:
//! `boot KERNEL [INITRAMFS] [--cpus N] [--mib N] [--cmdline TEXT] [--seconds N] [--forks N] [--fork-ms N]`.
//!
//! Without disks, network or agent. With `--forks` the machine goes on in a forked child every so often, as a
//! fork or a checkpoint of the monitor would have it; the parent only waits.
#![allow(unsafe_code, reason = "fork(2) has no safe form")]

use std::fs::File;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dormouse_snapshot::devices::x86::{MachineState, PowerState};
use dormouse_vmm::arch::x86_64::boot::{self, BootSource};
use dormouse_vmm::arch::x86_64::cpuid::{self, CpuTemplate};
use dormouse_vmm::arch::x86_64::{layout, power, state};
use dormouse_vmm::ending::Ending;
use dormouse_vmm::error::{StateError, VcpuError};
use dormouse_vmm::serial::{ConsoleLog, SerialPort};
use dormouse_vmm::vcpu::{Machine, VcpuSet};
use dormouse_vmm::vm::{Vm, open_kvm};
use dormouse_vmm::{Bus, GuestMemory, memory};
use kvm_ioctls::{Kvm, VcpuFd};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

type Failure = Box<dyn std::error::Error>;

struct Options {
    kernel: String,
    initramfs: Option<String>,
    cpus: usize,
    mib: u64,
    cmdline: String,
    template: CpuTemplate,
    time_max: Duration,
    forks: u32,
    fork_every: Duration,
}

fn options() -> Result<Options, Failure> {
    let mut options = Options {
        kernel: String::new(),
        initramfs: None,
        cpus: 1,
        mib: 256,
        cmdline: "console=ttyS0 panic=-1 reboot=k".into(),
        template: CpuTemplate::Host,
        time_max: Duration::from_secs(120),
        forks: 0,
        fork_every: Duration::from_secs(1),
    };
    let mut args = std::env::args().skip(1);
    let mut files = Vec::new();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--cpus" => options.cpus = value()?.parse()?,
            "--mib" => options.mib = value()?.parse()?,
            "--cmdline" => options.cmdline = value()?,
            "--template" => options.template = CpuTemplate::from_name(&value()?).ok_or("no such template")?,
            "--seconds" => options.time_max = Duration::from_secs(value()?.parse()?),
            "--forks" => options.forks = value()?.parse()?,
            "--fork-ms" => options.fork_every = Duration::from_millis(value()?.parse()?),
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

/// A machine that is put together; all vCPUs are parked.
struct Assembled {
    vm: Vm,
    vcpus: VcpuSet,
    ending: Arc<Ending>,
    serial: Arc<Mutex<SerialPort>>,
    power: Arc<Mutex<power::PowerRegisters>>,
}

fn booted(kvm: &Kvm, options: &Options) -> Result<Assembled, Failure> {
    let vm = Vm::new(kvm, memory::anonymous(options.mib)?)?;
    let entry = load(vm.memory(), options)?;
    let fds = vm.create_vcpus(options.cpus)?;
    boot::set_up_vcpus(&fds, &cpuid::supported(kvm, options.template)?, entry)?;
    assemble(vm, fds, None)
}

fn restored(kvm: &Kvm, memory: GuestMemory, saved: &MachineState) -> Result<Assembled, Failure> {
    let vm = Vm::new(kvm, memory)?;
    let fds = vm.create_vcpus(saved.vcpus.len())?;
    for (id, (fd, vcpu)) in fds.iter().zip(&saved.vcpus).enumerate() {
        state::restore_vcpu(fd, id, vcpu)?;
    }
    state::restore_vm(vm.fd(), &saved.vm)?;
    fds.iter().for_each(state::tell_paused);
    assemble(vm, fds, Some(saved))
}

fn assemble(vm: Vm, fds: Vec<VcpuFd>, saved: Option<&MachineState>) -> Result<Assembled, Failure> {
    let ending = Arc::new(Ending::new()?);
    let mut ports = Bus::new();
    let power = power::attach(&mut ports, &ending, saved.map_or(PowerState::default(), |saved| saved.power))?;
    let line = EventFd::new(EFD_CLOEXEC)?;
    vm.connect_interrupt(&line, layout::COM1_IRQ)?;
    let stdout = std::io::stdout().as_fd().try_clone_to_owned()?;
    let console = ConsoleLog::new(None, Some(stdout.into()))?;
    let serial = match saved {
        Some(saved) => SerialPort::restore(&saved.serial, line, console)?,
        None => SerialPort::new(line, console),
    };
    let serial = Arc::new(Mutex::new(serial));
    ports.insert(layout::COM1_BASE.into(), 8, serial.clone())?;
    let parts = Machine { mmio: Arc::new(Bus::new()), ports: Arc::new(ports), ending: Arc::clone(&ending) };
    Ok(Assembled { vm, vcpus: VcpuSet::start(fds, &parts)?, ending, serial, power })
}

impl Assembled {
    /// Runs for so long, or until it ends.
    fn run(&self, time: Duration) -> Result<(), Failure> {
        let since = Instant::now();
        self.vcpus.resume();
        while self.ending.reason().is_none() && since.elapsed() < time {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(self.vcpus.park()?)
    }

    fn capture(&self, kvm: &Kvm) -> Result<MachineState, Failure> {
        let indices = state::msr_indices(kvm)?;
        let vcpus = self.vcpus.with_parked(|id, fd| {
            let captured: Result<_, StateError> = state::capture_vcpu(fd, id, &indices);
            Ok::<_, VcpuError>(captured)
        })?;
        Ok(MachineState {
            vcpus: vcpus.into_iter().collect::<Result<_, _>>()?,
            vm: state::capture_vm(self.vm.fd())?,
            serial: self.serial.lock().unwrap_or_else(PoisonError::into_inner).save(),
            power: self.power.lock().unwrap_or_else(PoisonError::into_inner).save(),
        })
    }

    /// `None`: this is the parent, and the child went on and has ended.
    fn fork(self, kvm: &Kvm) -> Result<Option<Self>, Failure> {
        let start = Instant::now();
        let saved = self.capture(kvm)?;
        let captured = start.elapsed();
        // SAFETY: vCPU threads are parked and hold no lock; the child goes on with this thread alone.
        let pid = unsafe { libc::fork() };
        if pid < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        if pid > 0 {
            // SAFETY: no status is asked for.
            unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
            self.vcpus.stop()?;
            return Ok(None);
        }
        let forked = start.elapsed();
        self.vcpus.abandon();
        let memory = self.vm.memory().clone();
        drop(self.vm);
        let child = restored(kvm, memory, &saved)?;
        println!(
            "\n[captured in {captured:?}, forked at {forked:?}, the child is ready at {:?}]",
            start.elapsed()
        );
        Ok(Some(child))
    }

    fn show(&self) -> Result<(), Failure> {
        self.vcpus.with_parked(|id, fd| {
            if let (Ok(regs), Ok(sregs)) = (fd.get_regs(), fd.get_sregs()) {
                println!(
                    "vCPU {id}: rip {:#x} rsp {:#x} cr2 {:#x} cr3 {:#x}",
                    regs.rip, regs.rsp, sregs.cr2, sregs.cr3
                );
            }
            Ok::<_, VcpuError>(())
        })?;
        Ok(())
    }
}

fn main() -> Result<ExitCode, Failure> {
    let options = options()?;
    let start = Instant::now();
    let kvm = open_kvm()?;
    let mut machine = booted(&kvm, &options)?;
    for _ in 0..options.forks {
        machine.run(options.fork_every)?;
        if machine.ending.reason().is_some() {
            break;
        }
        match machine.fork(&kvm)? {
            Some(child) => machine = child,
            None => return Ok(ExitCode::SUCCESS),
        }
    }
    machine.run(options.time_max)?;
    println!("\n[{:.1} s, {} exits]", start.elapsed().as_secs_f64(), machine.vcpus.exits());
    machine.show()?;
    machine.vcpus.stop()?;
    match machine.ending.reason() {
        Some(reason) => println!("[{}: {reason}]", reason.code()),
        None => println!("[still running: stopped]"),
    }
    Ok(ExitCode::SUCCESS)
}
