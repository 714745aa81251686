//! The guest's disks: layer stacks that the block devices and the monitor share.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dormouse_snapshot::devices::DiskRecord;

use crate::control;
use crate::layers::{DiskStack, Frozen, LayerError};
use crate::virtio::BlockBackend;

/// One disk. The disk's thread works with it, and the monitor only while that is parked: the lock is
/// never waited for.
#[derive(Clone)]
pub struct SharedDisk(Arc<Mutex<DiskStack>>);

impl SharedDisk {
    fn stack(&self) -> MutexGuard<'_, DiskStack> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockBackend for SharedDisk {
    fn size_bytes(&self) -> u64 {
        self.stack().bytes()
    }

    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.stack().read_at(buffer, offset)
    }

    fn write_at(&mut self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.stack().write_at(buffer, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stack().flush()
    }

    fn write_zeroes(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.stack().zero_at(offset, bytes)
    }

    fn discards(&self) -> bool {
        !self.stack().read_only()
    }

    fn discard(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        self.stack().discard(offset, bytes)
    }
}

/// All disks of a guest, and how its upper layers are named.
pub struct Disks {
    disks: Vec<SharedDisk>,
    /// Upper layers made so far.
    made: u64,
}

impl Disks {
    /// `snapshot`: the folder with the layers that lie above the images, and how many there are for each disk.
    pub fn open(
        disks: &[control::Disk],
        snapshot: Option<(&Path, &[DiskRecord])>,
        dir: &Path,
    ) -> Result<Self, LayerError> {
        let mut all = Self { disks: Vec::new(), made: 0 };
        for (number, disk) in disks.iter().enumerate() {
            let images: Vec<&Path> = disk.layers.iter().map(PathBuf::as_path).collect();
            let frozen = snapshot.map_or_else(Vec::new, |(from, records)| {
                let layers = records.get(number).map_or(0, |record| record.layers);
                (0..layers).map(|layer| from.join(layer_name(number, layer.into()))).collect()
            });
            let frozen: Vec<&Path> = frozen.iter().map(PathBuf::as_path).collect();
            let upper = (!disk.read_only).then(|| all.next_upper(dir, number));
            let stack = DiskStack::open(&images, &frozen, upper.as_deref())?;
            stack.keep(dir, &kept_prefix(number));
            all.disks.push(SharedDisk(Arc::new(Mutex::new(stack))));
        }
        Ok(all)
    }

    fn next_upper(&mut self, dir: &Path, disk: usize) -> PathBuf {
        self.made += 1;
        dir.join(format!("upper{disk}.{}", self.made))
    }

    #[must_use]
    pub fn disks(&self) -> &[SharedDisk] {
        &self.disks
    }

    /// Freezes all upper layers; new ones are made in `dir`. Answers what is frozen then.
    pub fn freeze(&mut self, dir: &Path) -> Result<Vec<Frozen>, LayerError> {
        let mut frozen = Vec::new();
        for number in 0..self.disks.len() {
            let upper = self.next_upper(dir, number);
            let mut stack = self.disks[number].stack();
            stack.freeze(&upper)?;
            frozen.push(stack.frozen());
        }
        Ok(frozen)
    }

    /// In a forked child: the same frozen layers, upper ones of its own in `dir`.
    pub fn renew(&mut self, dir: &Path) -> Result<(), LayerError> {
        for number in 0..self.disks.len() {
            let upper = self.next_upper(dir, number);
            let mut stack = self.disks[number].stack();
            stack.renew_upper(&upper)?;
            stack.keep(dir, &kept_prefix(number));
        }
        Ok(())
    }

    /// What a snapshot's inventory says of them.
    #[must_use]
    pub fn records(&self) -> Vec<DiskRecord> {
        let record = |disk: &SharedDisk| {
            let stack = disk.stack();
            DiskRecord { bytes: stack.bytes(), layers: 0, read_only: stack.read_only() }
        };
        self.disks.iter().map(record).collect()
    }

    /// Where a snapshot made one layer out of `count` of a disk, that one is used from now on, and what it replaces is
    /// removed from `dir`.
    pub fn replace(&mut self, number: usize, count: usize, layer: crate::layers::Layer, dir: &Path) {
        let Some(disk) = self.disks.get(number) else { return };
        let mut stack = disk.stack();
        stack.replace(count, layer);
        stack.sweep(dir, &[&format!("upper{number}."), &kept_prefix(number)]);
        stack.keep(dir, &kept_prefix(number));
    }
}

/// The name of a disk's layer in a snapshot.
#[must_use]
pub fn layer_name(disk: usize, layer: usize) -> String {
    format!("{}{layer}", layer_prefix(disk))
}

#[must_use]
pub fn layer_prefix(disk: usize) -> String {
    format!("disk{disk}.")
}

fn kept_prefix(disk: usize) -> String {
    format!("kept{disk}.")
}
