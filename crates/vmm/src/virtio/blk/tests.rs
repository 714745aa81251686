//! A disk as a guest sees it.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use dormouse_snapshot::devices::virtio::VirtioState;
use proptest::prelude::*;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_STATUS;

use super::*;
use crate::virtio::Endpoint;
use crate::virtio::testing::{Buffer, Driver, memory};

const DISK_BYTES: usize = 4 << 20;

/// A disk that can be told to fail, and tells what it did.
#[derive(Default)]
struct Probe {
    flushes: u32,
    discarded: Vec<(u64, u64)>,
    fail_io: bool,
    fail_flush: bool,
}

struct ProbedDisk {
    disk: FileDisk,
    probe: Arc<Mutex<Probe>>,
}

impl BlockBackend for ProbedDisk {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.check()?;
        self.disk.read_at(buffer, offset)
    }

    fn write_at(&mut self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.check()?;
        self.disk.write_at(buffer, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut probe = self.probe.lock().unwrap();
        probe.flushes += 1;
        if probe.fail_flush { Err(io::Error::other("flush")) } else { self.disk.flush() }
    }

    fn discards(&self) -> bool {
        true
    }

    fn discard(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.probe.lock().unwrap().discarded.push((offset, bytes));
        Ok(())
    }
}

impl ProbedDisk {
    fn check(&self) -> io::Result<()> {
        if self.probe.lock().unwrap().fail_io { Err(io::Error::other("disk")) } else { Ok(()) }
    }
}

struct Bench {
    driver: Driver,
    file: File,
    probe: Arc<Mutex<Probe>>,
}

fn bench(features: u64, read_only: bool) -> Bench {
    let file = tempfile::tempfile().unwrap();
    file.set_len(DISK_BYTES as u64).unwrap();
    let probe = Arc::new(Mutex::new(Probe::default()));
    let memory = memory();
    let block = Block::new(disk(&file, &probe), read_only, "root-disk").unwrap();
    let endpoint = Endpoint::new(Box::new(block), memory.clone()).unwrap();
    Bench { driver: Driver::boot(endpoint, memory, features), file, probe }
}

fn disk(file: &File, probe: &Arc<Mutex<Probe>>) -> Box<dyn BlockBackend> {
    let file = File::from(file.as_fd().try_clone_to_owned().unwrap());
    Box::new(ProbedDisk { disk: FileDisk::new(file, DISK_BYTES as u64), probe: Arc::clone(probe) })
}

fn header(kind: u32, sector: u64) -> Buffer {
    Buffer::Out([&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat())
}

impl Bench {
    /// The status of a request that sends `data`.
    fn send(&mut self, kind: u32, sector: u64, data: &[u8]) -> u32 {
        let mut buffers = vec![header(kind, sector)];
        buffers.extend(data.chunks(0x1_0000).map(|part| Buffer::Out(part.to_vec())));
        buffers.push(Buffer::In(1));
        let (written, content) = self.driver.request(0, &buffers);
        assert_eq!(written, 1);
        u32::from(content[0])
    }

    fn get(&mut self, kind: u32, sector: u64, bytes: usize) -> Result<Vec<u8>, u32> {
        let mut buffers = vec![header(kind, sector)];
        let parts = bytes / 0x1_0000;
        buffers.extend((0..parts).map(|_| Buffer::In(0x1_0000)));
        buffers.push(Buffer::In(bytes % 0x1_0000));
        buffers.push(Buffer::In(1));
        let (written, mut content) = self.driver.request(0, &buffers);
        let status = u32::from(content.pop().unwrap());
        content.truncate(written as usize - 1);
        if status == VIRTIO_BLK_S_OK { Ok(content) } else { Err(status) }
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

#[test]
fn what_is_written_is_read_and_is_in_the_file() {
    let mut bench = bench(u64::MAX, false);
    for (sector, bytes) in [(0, 512), (8, 4096), (100, 1 << 20), (8184, 4096)] {
        let data = pattern(bytes);
        assert_eq!(bench.send(VIRTIO_BLK_T_OUT, sector, &data), VIRTIO_BLK_S_OK);
        assert_eq!(bench.get(VIRTIO_BLK_T_IN, sector, bytes), Ok(data.clone()));
        let mut stored = vec![0; bytes];
        std::os::unix::fs::FileExt::read_exact_at(&bench.file, &mut stored, sector * 512).unwrap();
        assert!(stored == data);
    }
    assert_eq!(bench.driver.config::<8>(0), 8192_u64.to_le_bytes());
}

#[test]
fn what_is_not_on_the_disk_is_an_error_and_nothing_else() {
    let mut bench = bench(u64::MAX, false);
    for sector in [8192, 8191, u64::MAX, u64::MAX / 512, 1 << 60] {
        assert_eq!(bench.send(VIRTIO_BLK_T_OUT, sector, &[1; 1024]), VIRTIO_BLK_S_IOERR);
        assert_eq!(bench.get(VIRTIO_BLK_T_IN, sector, 1024), Err(VIRTIO_BLK_S_IOERR));
    }
    assert_eq!(bench.send(VIRTIO_BLK_T_OUT, 0, &[1; 100]), VIRTIO_BLK_S_IOERR, "no whole sectors");
    assert_eq!(bench.get(77, 0, 512), Err(VIRTIO_BLK_S_UNSUPP));
    assert_eq!(bench.file.metadata().unwrap().len(), DISK_BYTES as u64);
    assert_eq!(bench.driver.endpoint.failure(), None);
}

#[test]
fn a_flush_reaches_the_disk_and_its_failure_the_guest_for_good() {
    let mut bench = bench(u64::MAX, false);
    assert_eq!(bench.send(VIRTIO_BLK_T_OUT, 0, &[1; 512]), VIRTIO_BLK_S_OK);
    assert_eq!(bench.probe.lock().unwrap().flushes, 0);
    assert_eq!(bench.send(VIRTIO_BLK_T_FLUSH, 0, &[]), VIRTIO_BLK_S_OK);
    assert_eq!(bench.probe.lock().unwrap().flushes, 1);
    bench.probe.lock().unwrap().fail_flush = true;
    assert_eq!(bench.send(VIRTIO_BLK_T_FLUSH, 0, &[]), VIRTIO_BLK_S_IOERR);
    bench.probe.lock().unwrap().fail_flush = false;
    assert_eq!(bench.send(VIRTIO_BLK_T_FLUSH, 0, &[]), VIRTIO_BLK_S_IOERR);
}

#[test]
fn a_guest_that_does_not_flush_gets_every_write_flushed() {
    let mut bench = bench(1 << 32, false);
    for writes in 1..4 {
        assert_eq!(bench.send(VIRTIO_BLK_T_OUT, 0, &[1; 512]), VIRTIO_BLK_S_OK);
        assert_eq!(bench.probe.lock().unwrap().flushes, writes);
    }
}

#[test]
fn the_disks_errors_are_the_guests() {
    let mut bench = bench(u64::MAX, false);
    bench.probe.lock().unwrap().fail_io = true;
    assert_eq!(bench.send(VIRTIO_BLK_T_OUT, 0, &[1; 512]), VIRTIO_BLK_S_IOERR);
    assert_eq!(bench.get(VIRTIO_BLK_T_IN, 0, 512), Err(VIRTIO_BLK_S_IOERR));
    assert_eq!(bench.send(VIRTIO_BLK_T_WRITE_ZEROES, 0, &Bench::range(0, 1, 0)), VIRTIO_BLK_S_IOERR);
    bench.probe.lock().unwrap().fail_io = false;
    assert_eq!(bench.get(VIRTIO_BLK_T_IN, 0, 512), Ok(vec![0; 512]));
    let errors = bench.driver.endpoint.with_device(|block: &mut Block, _| block.io_errors());
    assert_eq!(errors, Some(3));
}

#[test]
fn a_read_only_disk_is_not_written() {
    let mut bench = bench(u64::MAX, true);
    assert_ne!(bench.driver.offered() & 1 << VIRTIO_BLK_F_RO, 0);
    assert_eq!(bench.send(VIRTIO_BLK_T_OUT, 0, &[1; 512]), VIRTIO_BLK_S_IOERR);
    for kind in [VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_T_DISCARD] {
        assert_eq!(bench.send(kind, 0, &Bench::range(0, 1, 0)), VIRTIO_BLK_S_IOERR);
    }
    assert_eq!(bench.get(VIRTIO_BLK_T_IN, 0, 512), Ok(vec![0; 512]));
}

#[test]
fn the_serial_is_told() {
    let mut bench = bench(u64::MAX, false);
    let mut serial = b"root-disk".to_vec();
    serial.resize(20, 0);
    assert_eq!(bench.get(VIRTIO_BLK_T_GET_ID, 0, 20), Ok(serial.clone()));
    assert_eq!(bench.get(VIRTIO_BLK_T_GET_ID, 0, 300), Ok(serial));
    assert_eq!(bench.get(VIRTIO_BLK_T_GET_ID, 0, 4), Ok(b"root".to_vec()));
}

#[test]
fn zeroes_and_discards_stay_in_their_range() {
    let mut bench = bench(u64::MAX, false);
    assert_eq!(bench.send(VIRTIO_BLK_T_OUT, 0, &[7; 8 * 512]), VIRTIO_BLK_S_OK);
    assert_eq!(bench.send(VIRTIO_BLK_T_WRITE_ZEROES, 0, &Bench::range(2, 3, 1)), VIRTIO_BLK_S_OK);
    let expected = [vec![7; 2 * 512], vec![0; 3 * 512], vec![7; 3 * 512]].concat();
    assert_eq!(bench.get(VIRTIO_BLK_T_IN, 0, 8 * 512), Ok(expected));
    let ranges = [Bench::range(1, 2, 0), Bench::range(5, 1, 0)].concat();
    assert_eq!(bench.send(VIRTIO_BLK_T_DISCARD, 0, &ranges), VIRTIO_BLK_S_OK);
    assert_eq!(bench.probe.lock().unwrap().discarded, [(512, 1024), (2560, 512)]);
    for range in [Bench::range(8192, 1, 0), Bench::range(u64::MAX, 1, 0), Bench::range(0, u32::MAX, 0)] {
        assert_eq!(bench.send(VIRTIO_BLK_T_DISCARD, 0, &range), VIRTIO_BLK_S_IOERR);
        assert_eq!(bench.send(VIRTIO_BLK_T_WRITE_ZEROES, 0, &range), VIRTIO_BLK_S_IOERR);
    }
    assert_eq!(bench.send(VIRTIO_BLK_T_DISCARD, 0, &Bench::range(0, 1, 1)), VIRTIO_BLK_S_UNSUPP);
    assert_eq!(bench.send(VIRTIO_BLK_T_DISCARD, 0, &[0; 15]), VIRTIO_BLK_S_IOERR);
    let many = Bench::range(0, 1, 0).repeat(17);
    assert_eq!(bench.send(VIRTIO_BLK_T_DISCARD, 0, &many), VIRTIO_BLK_S_IOERR);
}

#[test]
fn many_requests_at_once_are_all_answered() {
    let mut bench = bench(u64::MAX, false);
    for sector in 0..80_u8 {
        let data = Buffer::Out(vec![sector; 512]);
        bench.driver.submit(0, &[header(VIRTIO_BLK_T_OUT, u64::from(sector)), data, Buffer::In(1)]);
    }
    bench.driver.kick(0);
    let answers = std::iter::from_fn(|| bench.driver.used(0)).count();
    assert_eq!(answers, 80);
    for sector in 0..80_u8 {
        assert_eq!(bench.get(VIRTIO_BLK_T_IN, u64::from(sector), 512), Ok(vec![sector; 512]));
    }
}

#[test]
fn a_request_without_status_or_header_stops_the_device() {
    for (buffers, reason) in [
        (vec![header(0, 0)], "no room for its status"),
        (vec![Buffer::Out(vec![0; 8]), Buffer::In(1)], "ends before"),
    ] {
        let mut bench = bench(u64::MAX, false);
        bench.driver.submit(0, &buffers);
        bench.driver.kick(0);
        assert!(bench.driver.endpoint.failure().unwrap().contains(reason));
        assert_eq!(bench.driver.get(VIRTIO_MMIO_STATUS), 0x4f);
    }
}

#[test]
fn a_restored_disk_must_have_its_size_and_goes_on() {
    let mut bench = bench(u64::MAX, false);
    assert_eq!(bench.send(VIRTIO_BLK_T_OUT, 3, &[9; 512]), VIRTIO_BLK_S_OK);
    let state = bench.driver.endpoint.save();
    let state = VirtioState::decode(&state.encode().unwrap()).unwrap();
    let DeviceState::Block(of_disk) = &state.device else { panic!("a disk's state") };
    let small = Box::new(FileDisk::new(tempfile::tempfile().unwrap(), 512));
    assert!(matches!(Block::restore(of_disk, small), Err(BlockError::Size { given: 512, .. })));
    let block = Block::restore(of_disk, disk(&bench.file, &bench.probe)).unwrap();
    let endpoint = Endpoint::restore(&state, Box::new(block), bench.driver.memory.clone()).unwrap();
    endpoint.resume();
    bench.driver = bench.driver.moved_to(endpoint);
    assert_eq!(bench.get(VIRTIO_BLK_T_IN, 3, 512), Ok(vec![9; 512]));
    assert_eq!(bench.send(VIRTIO_BLK_T_OUT, 4, &[8; 512]), VIRTIO_BLK_S_OK);
    assert_eq!(bench.probe.lock().unwrap().flushes, 0, "the guest still flushes itself");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_disk_is_an_array_of_sectors(
        writes in prop::collection::vec((0..8300_u64, 0..300_usize, any::<u8>()), 1..20),
    ) {
        let mut bench = bench(u64::MAX, false);
        let mut model = vec![0; DISK_BYTES];
        for (sector, sectors, byte) in writes {
            let range = usize::try_from(sector * 512).unwrap()..usize::try_from(sector * 512).unwrap() + sectors * 512;
            let fits = range.end <= DISK_BYTES;
            let status = bench.send(VIRTIO_BLK_T_OUT, sector, &vec![byte; sectors * 512]);
            prop_assert_eq!(status == VIRTIO_BLK_S_OK, fits);
            if fits {
                model[range].fill(byte);
            }
        }
        for sector in (0..8192).step_by(1024) {
            let at = usize::try_from(sector * 512).unwrap();
            let read = bench.get(VIRTIO_BLK_T_IN, sector, 1024 * 512).unwrap();
            prop_assert!(read == model[at..at + 1024 * 512]);
        }
    }

    #[test]
    fn no_request_does_harm(
        head in any::<[u8; 16]>(), kind in 0..16_u32, sent in prop::collection::vec(any::<u8>(), 0..100),
        room in 0..2000_usize, cut in 0..17_usize,
    ) {
        let mut bench = bench(u64::MAX, false);
        let mut head = head.to_vec();
        head[..4].copy_from_slice(&kind.to_le_bytes());
        head.truncate(cut);
        bench.driver.submit(0, &[Buffer::Out(head), Buffer::Out(sent), Buffer::In(room)]);
        bench.driver.kick(0);
        let answered = bench.driver.used(0).is_some();
        prop_assert_ne!(answered, bench.driver.endpoint.failure().is_some());
        prop_assert_eq!(bench.file.metadata().unwrap().len(), DISK_BYTES as u64);
    }
}
