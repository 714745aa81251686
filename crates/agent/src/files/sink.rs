//! One file that is being received: held in memory while it is small, else written in batches, one of
//! which is on its way to the disk while the next one arrives. No thread waits for the client.
//!
//! Dropping a sink that was not finished leaves nothing behind.

use std::io::{self, IoSlice, Write as _};

use axum::body::Bytes;
use tokio::task::JoinHandle;

use super::error::Refusal;
use super::pool::{PIECE_BYTES, Pool};
use super::target::{Target, Unfinished};
use crate::filesystem::blocking;

/// Content up to this size is written in one go when it is complete.
const MEMORY_BYTES_MAX: usize = 1 << 20;
/// Portions of at least this size are written as they are; smaller ones are gathered.
const PORTION_BYTES: usize = 64 << 10;
/// Bytes that are written at a time.
const BATCH_BYTES: usize = 1 << 20;

pub struct Sink {
    target: Target,
    /// Small portions, gathered.
    held: Vec<u8>,
    /// What is written next.
    batch: Vec<Bytes>,
    batch_bytes: usize,
    pool: Pool,
    writing: Writing,
}

enum Writing {
    NotYet,
    Idle(Unfinished),
    Busy(JoinHandle<Result<Unfinished, Refusal>>),
}

impl Sink {
    #[must_use]
    pub fn new(target: Target) -> Self {
        Self {
            target,
            held: Vec::new(),
            batch: Vec::new(),
            batch_bytes: 0,
            pool: Pool::default(),
            writing: Writing::NotYet,
        }
    }

    pub async fn push(&mut self, bytes: Bytes) -> Result<(), Refusal> {
        if matches!(self.writing, Writing::NotYet) {
            if self.held.len() + bytes.len() <= MEMORY_BYTES_MAX {
                self.held.extend_from_slice(&bytes);
                return Ok(());
            }
            let target = self.target.clone();
            self.writing = Writing::Idle(blocking(move || target.begin()).await?);
        }
        if bytes.len() >= PORTION_BYTES {
            self.flush();
            self.add(bytes);
        } else {
            self.held.extend_from_slice(&bytes);
            if self.held.len() + PORTION_BYTES > PIECE_BYTES {
                self.flush();
            }
        }
        if self.batch_bytes >= BATCH_BYTES { self.write_batch().await } else { Ok(()) }
    }

    /// The content is complete: it becomes the file.
    pub async fn finish(mut self) -> Result<(), Refusal> {
        if matches!(self.writing, Writing::NotYet) {
            let (target, content) = (self.target, self.held);
            return blocking(move || target.write(&content)).await;
        }
        self.flush();
        self.write_batch().await?;
        let finished = self.idle().await?;
        let target = self.target;
        blocking(move || target.publish(finished)).await
    }

    fn flush(&mut self) {
        if !self.held.is_empty() {
            let held = std::mem::replace(&mut self.held, self.pool.take());
            let bytes = self.pool.lend(held);
            self.add(bytes);
        }
    }

    fn add(&mut self, bytes: Bytes) {
        self.batch_bytes += bytes.len();
        self.batch.push(bytes);
    }

    /// Waits for the last batch and starts this one.
    async fn write_batch(&mut self) -> Result<(), Refusal> {
        let unfinished = self.idle().await?;
        let batch = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let path = self.target.path.clone();
        self.writing = Writing::Busy(tokio::task::spawn_blocking(move || {
            write_all(&unfinished.file, &batch).map_err(|why| Refusal::io("writing", &path, &why))?;
            Ok(unfinished)
        }));
        Ok(())
    }

    /// The file, when nothing is being written to it.
    async fn idle(&mut self) -> Result<Unfinished, Refusal> {
        match std::mem::replace(&mut self.writing, Writing::NotYet) {
            Writing::Idle(unfinished) => Ok(unfinished),
            Writing::Busy(task) => match task.await {
                Ok(written) => written,
                Err(why) => std::panic::resume_unwind(why.into_panic()),
            },
            Writing::NotYet => {
                let target = self.target.clone();
                blocking(move || target.begin()).await
            }
        }
    }
}

fn write_all(mut file: &std::fs::File, portions: &[Bytes]) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = portions.iter().map(|portion| IoSlice::new(portion)).collect();
    let mut slices = slices.as_mut_slice();
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match file.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut slices, written),
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
    Ok(())
}
