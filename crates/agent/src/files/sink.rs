//! One file that is being received: held in memory while it is small, else written by a thread of its
//! own while more arrives.
//!
//! Dropping a sink that was not finished leaves nothing behind.

use std::io::{self, IoSlice, Write as _};

use axum::body::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::error::Refusal;
use super::pool::{PIECE_BYTES, Pool};
use super::target::Target;
use crate::filesystem::blocking;

/// Content up to this size is written in one go when it is complete.
const MEMORY_BYTES_MAX: usize = 1 << 20;
/// Portions of at least this size are handed to the thread as they are; smaller ones are gathered.
const PORTION_BYTES: usize = 64 << 10;
/// Portions between the connection and the thread.
const PORTIONS_MAX: usize = 8;

pub struct Sink {
    target: Target,
    held: Vec<u8>,
    pool: Pool,
    writer: Option<Writer>,
}

struct Writer {
    portions: mpsc::Sender<Step>,
    thread: JoinHandle<Result<(), Refusal>>,
}

enum Step {
    Write(Bytes),
    Publish,
}

impl Sink {
    #[must_use]
    pub fn new(target: Target) -> Self {
        Self { target, held: Vec::new(), pool: Pool::default(), writer: None }
    }

    pub async fn push(&mut self, bytes: Bytes) -> Result<(), Refusal> {
        if self.writer.is_none() {
            if self.held.len() + bytes.len() <= MEMORY_BYTES_MAX {
                self.held.extend_from_slice(&bytes);
                return Ok(());
            }
            self.writer = Some(Writer::start(self.target.clone()).await?);
        }
        if bytes.len() >= PORTION_BYTES {
            self.flush().await?;
            return self.send(Step::Write(bytes)).await;
        }
        self.held.extend_from_slice(&bytes);
        if self.held.len() + PORTION_BYTES > PIECE_BYTES { self.flush().await } else { Ok(()) }
    }

    /// The content is complete: it becomes the file.
    pub async fn finish(mut self) -> Result<(), Refusal> {
        if self.writer.is_none() {
            let (target, content) = (self.target, self.held);
            return blocking(move || target.write(&content)).await;
        }
        self.flush().await?;
        self.send(Step::Publish).await?;
        match self.writer.take() {
            Some(writer) => writer.outcome().await,
            None => Ok(()),
        }
    }

    async fn flush(&mut self) -> Result<(), Refusal> {
        if self.held.is_empty() {
            return Ok(());
        }
        let held = std::mem::replace(&mut self.held, self.pool.take());
        let bytes = self.pool.lend(held);
        self.send(Step::Write(bytes)).await
    }

    async fn send(&mut self, step: Step) -> Result<(), Refusal> {
        let Some(writer) = &self.writer else { return Ok(()) };
        if writer.portions.send(step).await.is_ok() {
            return Ok(());
        }
        // The thread went first: it says why.
        match self.writer.take() {
            Some(writer) => writer.outcome().await,
            None => Ok(()),
        }
    }
}

impl Writer {
    async fn start(target: Target) -> Result<Self, Refusal> {
        let starting = target.clone();
        let unfinished = blocking(move || starting.begin()).await?;
        let (portions, mut steps) = mpsc::channel(PORTIONS_MAX);
        let thread = tokio::task::spawn_blocking(move || {
            let mut gathered = Vec::with_capacity(PORTIONS_MAX);
            loop {
                // The sender is gone without a word: the upload broke, and `unfinished` goes too.
                let Some(mut step) = steps.blocking_recv() else { return Ok(()) };
                let publish = loop {
                    match step {
                        Step::Write(bytes) => gathered.push(bytes),
                        Step::Publish => break true,
                    }
                    if gathered.len() == PORTIONS_MAX {
                        break false;
                    }
                    match steps.try_recv() {
                        Ok(next) => step = next,
                        Err(_) => break false,
                    }
                };
                write_all(&unfinished.file, &gathered)
                    .map_err(|why| Refusal::io("writing", &target.path, &why))?;
                gathered.clear();
                if publish {
                    return target.publish(unfinished);
                }
            }
        });
        Ok(Self { portions, thread })
    }

    async fn outcome(self) -> Result<(), Refusal> {
        drop(self.portions);
        match self.thread.await {
            Ok(outcome) => outcome,
            Err(why) => std::panic::resume_unwind(why.into_panic()),
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
