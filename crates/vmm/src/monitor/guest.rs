//! A guest with all its parts: how it is put together, stopped, read and let go.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use dormouse_snapshot::devices::Inventory;
use dormouse_snapshot::devices::virtio::{DeviceKind, VirtioState};
use dormouse_snapshot::devices::x86::{MachineState, PowerState, SerialState};
use dormouse_snapshot::{WORKING_SET_BYTES_MAX, WorkingSet};
use kvm_bindings::CpuId;
use kvm_ioctls::{Kvm, VcpuFd};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::devices::{self, DevicesError};
use super::disks::Disks;
use super::probe::Probe;
use super::saved::Saved;
use crate::arch::x86_64::boot::{self, BootSource};
use crate::arch::x86_64::cpuid::{self, CpuTemplate};
use crate::arch::x86_64::power::{self, PowerRegisters};
use crate::arch::x86_64::{layout, state};
use crate::bus::{Bus, BusError};
use crate::control::{Kernel, Machine, WORKING_SET};
use crate::ending::{EndReason, Ending};
use crate::error::{BootError, MemoryError, StateError, VcpuError, VmError};
use crate::layers::LayerError;
use crate::layers::memory::{self, Base};
use crate::memory::GuestMemory;
use crate::pager::{Pager, PagerError};
use crate::serial::{ConsoleLog, SerialPort};
use crate::vcpu::{self, VcpuSet};
use crate::virtio::{Endpoint, QUEUE_NOTIFY_OFFSET, Worker};
use crate::vm::Vm;

/// The guest's console, in the monitor's folder.
const SERIAL_LOG: &str = "serial.log";
/// A panic is a reboot, a reboot ends the monitor by the keyboard controller (a triple fault would look like a crash);
/// the processor's random numbers may seed the guest's.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=k random.trust_cpu=on";

#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error("the guest's memory cannot be made")]
    Memory(#[source] MemoryError),
    #[error("the virtual machine cannot be made")]
    Vm(#[source] VmError),
    #[error("the guest's processors cannot be run")]
    Vcpu(#[source] VcpuError),
    #[error("the guest cannot be booted")]
    Boot(#[source] BootError),
    #[error("the guest's state cannot be read or written")]
    State(#[source] StateError),
    #[error("a layer cannot be used")]
    Layer(#[source] LayerError),
    #[error("the guest's devices cannot be made")]
    Devices(#[source] DevicesError),
    #[error("two devices are at the same place")]
    Bus(#[source] BusError),
    #[error("cannot open {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("the host has no descriptor left")]
    Descriptor(#[source] io::Error),
    #[error("the guest's memory cannot be brought by a pager")]
    Pager(#[source] PagerError),
    #[error("a disk does not come to rest")]
    Worker(#[source] io::Error),
    #[error("the guest has come to its end: {0}")]
    Ended(EndReason),
    #[error("there is no CPU baseline {0}")]
    CpuTemplate(String),
    #[error("the snapshot has {saved} {what}, the machine {given}")]
    Mismatch { what: &'static str, saved: u64, given: u64 },
}

/// What a guest has on the host's side, beside its disks.
pub struct HostSide {
    /// The monitor's folder.
    pub dir: PathBuf,
    pub carrier_in: OwnedFd,
    pub carrier_out: OwnedFd,
    pub tap: Option<OwnedFd>,
}

/// A guest, running or paused.
pub struct Guest {
    pub machine: Machine,
    pub memory: GuestMemory,
    /// What the memory was restored from.
    pub base: Base,
    /// The memory of the last snapshot, its own or an ancestor's: the next one has what differs.
    pub last: Vec<Arc<File>>,
    pub disks: Disks,
    /// There while not all of the memory is.
    pub pager: Option<Pager>,
    pub endpoints: Vec<Endpoint>,
    pub ending: Arc<Ending>,
    pub running: bool,
    /// Restored or forked, and not yet resumed: notifications under way were lost.
    stale: bool,
    vcpus: VcpuSet,
    /// One for each disk.
    workers: Vec<Worker>,
    vm: Vm,
    serial: Arc<Mutex<SerialPort>>,
    power: Arc<Mutex<PowerRegisters>>,
    msrs: Arc<[u32]>,
}

/// The parts that are wired together with a VM before its vCPUs exist as threads.
struct Wired {
    vm: Vm,
    fds: Vec<VcpuFd>,
    ending: Arc<Ending>,
    serial: Arc<Mutex<SerialPort>>,
    power: Arc<Mutex<PowerRegisters>>,
    mmio: Bus,
    ports: Bus,
}

impl Guest {
    /// A guest that starts its kernel when it is resumed.
    pub fn boot(kvm: &Kvm, machine: Machine, kernel: &Kernel, host: HostSide) -> Result<Self, GuestError> {
        let template = cpu_template(&machine)?;
        let memory = new_memory(&machine)?;
        let disks = Disks::open(&machine.disks, None, &host.dir).map_err(GuestError::Layer)?;
        let dir = host.dir.clone();
        let endpoints = devices::make(&machine, &disks, host, &memory).map_err(GuestError::Devices)?;
        let (vm, fds) = make_vm(kvm, &machine, &memory)?;
        let wired = wire(vm, fds, &endpoints, &dir, None)?;
        let cpuid = cpuid::supported(kvm, template).map_err(GuestError::Vm)?;
        load(kernel, &cpuid, &memory, endpoints.len(), &wired.fds)?;
        let msrs = state::msr_indices(kvm).map_err(GuestError::State)?.into();
        Self::start(wired, Contents { machine, memory, base: Base::default(), disks, endpoints, msrs })
    }

    /// A guest as a snapshot has it; paused. `inventory` and `saved` were read from `from`. `userfaults`: a pager brings
    /// its memory, made by them; without, it is mapped.
    pub fn restore(
        kvm: &Kvm,
        machine: Machine,
        from: &Path,
        (inventory, saved): (&Inventory, &Saved),
        userfaults: Option<&File>,
        host: HostSide,
    ) -> Result<Self, GuestError> {
        check_inventory(&machine, inventory)?;
        let memory = new_memory(&machine)?;
        let paths: Vec<PathBuf> =
            (0..inventory.memory_layers).map(|layer| from.join(memory_name(layer.into()))).collect();
        let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        let base = Base::open(&paths, memory::size(&memory)).map_err(GuestError::Layer)?;
        base.keep(&host.dir);
        let (mut last, mut mapped) = (Vec::new(), base);
        let pager = match userfaults {
            None => {
                mapped.map(&memory).map_err(GuestError::Layer)?;
                None
            }
            Some(device) => {
                let pager = start_pager(device, &memory, &mapped, from, &host.dir)?;
                // Nothing of it is mapped: what changed is found by comparing.
                last = mapped.files();
                mapped = Base::default();
                Some(pager)
            }
        };
        let base = mapped;
        let disks = Disks::open(&machine.disks, Some((from, &inventory.disks)), &host.dir)
            .map_err(GuestError::Layer)?;
        let msrs = state::msr_indices(kvm).map_err(GuestError::State)?.into();
        let parts = Kept { machine, memory, base, last, disks, msrs };
        let mut guest = Self::rebuild(kvm, parts, saved, host)?;
        guest.pager = pager;
        Ok(guest)
    }

    /// A VM and devices of its own over memory and disks that are there: after a restore, and in a forked child.
    pub fn rebuild(kvm: &Kvm, kept: Kept, saved: &Saved, host: HostSide) -> Result<Self, GuestError> {
        let Kept { machine, memory, base, last, disks, msrs } = kept;
        let dir = host.dir.clone();
        let endpoints =
            devices::restore(&machine, &disks, host, &memory, &saved.virtio).map_err(GuestError::Devices)?;
        let (vm, fds) = make_vm(kvm, &machine, &memory)?;
        let expected = saved.platform.vcpus.len();
        if expected != fds.len() {
            return Err(GuestError::State(StateError::VcpuCount { given: fds.len(), saved: expected }));
        }
        for (id, (fd, saved)) in fds.iter().zip(&saved.platform.vcpus).enumerate() {
            state::restore_vcpu(fd, id, saved).map_err(GuestError::State)?;
        }
        state::restore_vm(vm.fd(), &saved.platform.vm).map_err(GuestError::State)?;
        // The lines last: an interrupt that is raised anew goes to the controllers as they were saved.
        let wired = wire(vm, fds, &endpoints, &dir, Some(&saved.platform))?;
        let mut guest = Self::start(wired, Contents { machine, memory, base, disks, endpoints, msrs })?;
        guest.stale = true;
        guest.last = last;
        guest.keep_last(&dir);
        Ok(guest)
    }

    fn start(wired: Wired, contents: Contents) -> Result<Self, GuestError> {
        let Wired { vm, fds, ending, serial, power, mmio, ports } = wired;
        let shared =
            vcpu::Machine { mmio: Arc::new(mmio), ports: Arc::new(ports), ending: Arc::clone(&ending) };
        let vcpus = VcpuSet::start(fds, &shared).map_err(GuestError::Vcpu)?;
        let Contents { machine, memory, base, disks, endpoints, msrs } = contents;
        let workers = start_workers(&endpoints, &ending)?;
        let (running, stale, last) = (false, false, Vec::new());
        Ok(Self {
            machine,
            memory,
            base,
            last,
            disks,
            pager: None,
            endpoints,
            ending,
            running,
            stale,
            vcpus,
            workers,
            vm,
            serial,
            power,
            msrs,
        })
    }

    /// Stops the vCPUs where they are, and then the disks' threads when they have answered what they were at.
    /// Idempotent. On an error all go on.
    pub fn pause(&mut self) -> Result<(), GuestError> {
        let parked = self.vcpus.park().map_err(GuestError::Vcpu);
        let parked =
            parked.and_then(|()| self.workers.iter().try_for_each(Worker::park).map_err(GuestError::Worker));
        if parked.is_err() && self.running {
            self.workers.iter().for_each(Worker::resume);
            self.vcpus.resume();
        }
        parked?;
        self.running = false;
        Ok(())
    }

    /// Idempotent.
    pub fn resume(&mut self) -> Result<(), GuestError> {
        if self.running {
            return Ok(());
        }
        if std::mem::take(&mut self.stale) {
            self.endpoints.iter().for_each(Endpoint::resume);
        }
        let told = self.vcpus.with_parked(|_, fd| {
            state::tell_paused(fd);
            Ok::<_, VcpuError>(())
        });
        told.map_err(GuestError::Vcpu)?;
        self.workers.iter().for_each(Worker::resume);
        self.vcpus.resume();
        self.running = true;
        Ok(())
    }

    /// Reads everything but memory and disks. The guest must be paused.
    pub fn save(&self) -> Result<Saved, GuestError> {
        let msrs = &self.msrs;
        // The devices first: their last words to the guest are interrupts that the controllers then hold.
        let virtio: Vec<VirtioState> = self.endpoints.iter().map(Endpoint::save).collect();
        // A copy of what has ended would end as soon as it began.
        if let Some(reason) = self.ending.reason() {
            return Err(GuestError::Ended(reason.clone()));
        }
        let vcpus =
            self.vcpus.with_parked(|id, fd| state::capture_vcpu(fd, id, msrs).map_err(GuestError::State))?;
        let vm = state::capture_vm(self.vm.fd()).map_err(GuestError::State)?;
        let serial = self.serial.lock().unwrap_or_else(PoisonError::into_inner).save();
        let power = self.power.lock().unwrap_or_else(PoisonError::into_inner).save();
        Ok(Saved { platform: MachineState { vcpus, vm, serial, power }, virtio })
    }

    /// The files that `paths` name are the memory of the last snapshot from now on. Best effort: without it the next
    /// one is larger.
    pub fn set_last(&mut self, paths: impl Iterator<Item = PathBuf>, dir: &Path) {
        if let Ok(files) = paths.map(|path| File::open(path).map(Arc::new)).collect() {
            self.last = files;
            self.keep_last(dir);
        }
    }

    /// Names in `dir` for the memory of the last snapshot, whatever becomes of the snapshot.
    fn keep_last(&self, dir: &Path) {
        for number in 0..=crate::layers::CHAIN_MAX {
            let path = dir.join(format!("last.memory.{number}"));
            // It may not be there.
            let _ = std::fs::remove_file(&path);
            if let Some(file) = self.last.get(number) {
                crate::layers::link(file, &path);
            }
        }
    }

    /// Of the files that it may grow: its disks' and its memory's layers.
    #[must_use]
    pub fn largest_file_bytes(&self) -> u64 {
        let disks = self.disks.records().into_iter().map(|disk| disk.bytes).max().unwrap_or(0);
        crate::layers::memory::size(&self.memory).max(disks)
    }

    /// Ends the guest.
    pub fn stop(self) -> Result<(), GuestError> {
        self.workers.into_iter().for_each(Worker::quit);
        self.vcpus.stop().map_err(GuestError::Vcpu)
    }

    /// In a forked child: lets go of what belongs to the parent's VM, and keeps what goes on here.
    pub fn abandon(self) -> Kept {
        self.vcpus.abandon();
        self.workers.into_iter().for_each(Worker::abandon);
        let (machine, memory, base, last) = (self.machine, self.memory, self.base, self.last);
        Kept { machine, memory, base, last, disks: self.disks, msrs: self.msrs }
    }
}

impl From<VcpuError> for GuestError {
    fn from(error: VcpuError) -> Self {
        Self::Vcpu(error)
    }
}

/// What a forked child has in common with its parent.
pub struct Kept {
    machine: Machine,
    memory: GuestMemory,
    pub base: Base,
    last: Vec<Arc<File>>,
    pub disks: Disks,
    msrs: Arc<[u32]>,
}

struct Contents {
    machine: Machine,
    memory: GuestMemory,
    base: Base,
    disks: Disks,
    endpoints: Vec<Endpoint>,
    msrs: Arc<[u32]>,
}

/// The name of a memory layer in a snapshot.
#[must_use]
pub fn memory_name(layer: usize) -> String {
    format!("memory.{layer}")
}

/// Fills memory with what the guest starts from, and sets the vCPUs to its start.
fn load(
    kernel: &Kernel,
    cpuid: &CpuId,
    memory: &GuestMemory,
    slots: usize,
    fds: &[VcpuFd],
) -> Result<(), GuestError> {
    let image = open(&kernel.image)?;
    let unread = |source| GuestError::Open { path: kernel.image.clone(), source };
    if let Some(probe) = Probe::read(&image).map_err(unread)? {
        return probe.load(memory, fds, cpuid).map_err(GuestError::Boot);
    }
    let initramfs = kernel.initramfs.as_deref().map(open).transpose()?;
    let source = BootSource {
        kernel: &image,
        initramfs: initramfs.as_ref(),
        cmdline: &cmdline(&kernel.cmdline_extra),
        vcpus: fds.len(),
        virtio_slots: slots,
    };
    let entry = boot::load(memory, &source).map_err(GuestError::Boot)?;
    boot::set_up_vcpus(fds, cpuid, entry).map_err(GuestError::Boot)
}

fn open(path: &Path) -> Result<File, GuestError> {
    File::open(path).map_err(|source| GuestError::Open { path: path.to_owned(), source })
}

fn cmdline(extra: &str) -> String {
    if extra.is_empty() { CMDLINE.to_owned() } else { format!("{CMDLINE} {extra}") }
}

fn cpu_template(machine: &Machine) -> Result<CpuTemplate, GuestError> {
    let Some(name) = &machine.cpu_template else { return Ok(CpuTemplate::default()) };
    CpuTemplate::from_name(name).ok_or_else(|| GuestError::CpuTemplate(name.clone()))
}

fn new_memory(machine: &Machine) -> Result<GuestMemory, GuestError> {
    let memory = crate::memory::anonymous(machine.memory_mib.into()).map_err(GuestError::Memory)?;
    if !machine.huge_pages {
        crate::layers::memory::keep_small(&memory);
    }
    Ok(memory)
}

fn start_pager(
    device: &File,
    memory: &GuestMemory,
    base: &Base,
    from: &Path,
    dir: &Path,
) -> Result<Pager, GuestError> {
    let working_set = read_working_set(from).filter(|set| set.memory_bytes() == memory::size(memory));
    let ends = dir.to_owned();
    let on_death = move |why| super::end_without_pager(&ends, why);
    Pager::start(device, memory, base, working_set.as_ref(), dir, on_death).map_err(GuestError::Pager)
}

/// A hint: without it, or if it is damaged, the restore is slower.
fn read_working_set(from: &Path) -> Option<WorkingSet> {
    let mut bytes = Vec::new();
    let file = File::open(from.join(WORKING_SET)).ok()?;
    file.take(WORKING_SET_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).ok()?;
    WorkingSet::decode(&bytes).ok()
}

fn check_inventory(machine: &Machine, inventory: &Inventory) -> Result<(), GuestError> {
    let same = |what, saved: u64, given: u64| {
        if saved == given { Ok(()) } else { Err(GuestError::Mismatch { what, saved, given }) }
    };
    same("vCPUs", inventory.vcpus.into(), machine.vcpus.into())?;
    same("MiB of memory", inventory.memory_mib.into(), machine.memory_mib.into())?;
    same("disks", inventory.disks.len() as u64, machine.disks.len() as u64)?;
    same("network devices", inventory.net.into(), machine.net.into())?;
    for (saved, given) in inventory.disks.iter().zip(&machine.disks) {
        same("read-only disks at this place", saved.read_only.into(), given.read_only.into())?;
    }
    Ok(())
}

fn make_vm(kvm: &Kvm, machine: &Machine, memory: &GuestMemory) -> Result<(Vm, Vec<VcpuFd>), GuestError> {
    let vm = Vm::new(kvm, memory.clone()).map_err(GuestError::Vm)?;
    let fds = vm.create_vcpus(machine.vcpus.into()).map_err(GuestError::Vm)?;
    Ok((vm, fds))
}

/// Connects the devices to the VM.
fn wire(
    vm: Vm,
    fds: Vec<VcpuFd>,
    endpoints: &[Endpoint],
    dir: &Path,
    saved: Option<&MachineState>,
) -> Result<Wired, GuestError> {
    let (mut mmio, mut ports) = (Bus::new(), Bus::new());
    let ending = Arc::new(Ending::new().map_err(GuestError::Descriptor)?);
    for (slot, endpoint) in endpoints.iter().enumerate() {
        connect(&vm, &mut mmio, slot, endpoint)?;
        endpoint.end_with(&ending);
    }
    let line = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(GuestError::Descriptor)?;
    vm.connect_interrupt(&line, layout::COM1_IRQ).map_err(GuestError::Vm)?;
    let serial = serial_port(dir, line, saved.map(|saved| &saved.serial))?;
    ports.insert(layout::COM1_BASE.into(), 8, serial.clone()).map_err(GuestError::Bus)?;
    let power_state = saved.map_or_else(PowerState::default, |saved| saved.power);
    let power = power::attach(&mut ports, &ending, power_state).map_err(GuestError::Bus)?;
    Ok(Wired { vm, fds, ending, serial, power, mmio, ports })
}

/// A thread for each disk, which may be slow; they are parked.
fn start_workers(endpoints: &[Endpoint], ending: &Arc<Ending>) -> Result<Vec<Worker>, GuestError> {
    let disks = endpoints.iter().filter(|endpoint| has_worker(endpoint)).enumerate();
    disks
        .map(|(number, endpoint)| {
            Worker::start(&format!("disk{number}"), endpoint.clone(), Arc::clone(ending))
                .map_err(GuestError::Worker)
        })
        .collect()
}

/// Whether a thread of its own serves the device, and not the monitor's.
#[must_use]
pub fn has_worker(endpoint: &Endpoint) -> bool {
    endpoint.kind() == DeviceKind::Block
}

fn connect(vm: &Vm, mmio: &mut Bus, slot: usize, endpoint: &Endpoint) -> Result<(), GuestError> {
    let no_slot = GuestError::Mismatch {
        what: "devices",
        saved: slot as u64 + 1,
        given: layout::VIRTIO_SLOTS_MAX as u64,
    };
    let (base, irq) = layout::virtio_slot(slot).ok_or(no_slot)?;
    mmio.insert(base, layout::VIRTIO_MMIO_BYTES, endpoint.bus_device()).map_err(GuestError::Bus)?;
    vm.connect_interrupt(endpoint.irq_fd(), irq).map_err(GuestError::Vm)?;
    for (queue, event) in (0_u32..).zip(endpoint.queue_fds()) {
        vm.connect_notify(event, base + QUEUE_NOTIFY_OFFSET, queue).map_err(GuestError::Vm)?;
    }
    Ok(())
}

fn serial_port(
    dir: &Path,
    line: EventFd,
    saved: Option<&SerialState>,
) -> Result<Arc<Mutex<SerialPort>>, GuestError> {
    let path = dir.join(SERIAL_LOG);
    let failed = |source| GuestError::Open { path: path.clone(), source };
    let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
    let log = ConsoleLog::new(Some(file.map_err(failed)?), None).map_err(failed)?;
    let port = match saved {
        Some(saved) => SerialPort::restore(saved, line, log).map_err(failed)?,
        None => SerialPort::new(line, log),
    };
    Ok(Arc::new(Mutex::new(port)))
}
