//! A thread of its own for a device whose host's side may block: a disk that is slow stalls nobody else.
//!
//! ```text
//!            start               resume                 park
//!   (made) ─────────▶ parked ──────────────▶ serving ──────────▶ parked        quit ─▶ (gone by itself)
//! ```
//! A parked thread has finished the request that it was at, so that all that was begun is answered; it waits on a
//! condition and holds no lock. After `fork(2)` the child has the endpoint but not the thread: it forgets it
//! ([`Worker::abandon`]) and makes another.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::Endpoint;
use crate::ending::{EndReason, Ending};

/// How long the request that it is at may take to be done.
const PARK_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    Park,
    Serve,
    Quit,
}

#[derive(Debug)]
struct State {
    wish: Wish,
    parked: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Written when the wish changed.
    wake: EventFd,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wish(&self, wish: Wish) {
        self.lock().wish = wish;
        self.changed.notify_all();
        // Only fails when the counter is full: then it is readable anyway.
        let _ = self.wake.write(1);
    }
}

/// The thread that serves one device.
pub struct Worker {
    name: String,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

impl Worker {
    /// It is parked.
    pub fn start(name: &str, endpoint: Endpoint, ending: Arc<Ending>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State { wish: Wish::Park, parked: true }),
            changed: Condvar::new(),
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        });
        let theirs = Arc::clone(&shared);
        let serve = move || thread_main(&theirs, &endpoint, &ending);
        let thread = Builder::new().name(name.to_owned()).spawn(serve)?;
        Ok(Self { name: name.to_owned(), shared, thread })
    }

    pub fn resume(&self) {
        self.shared.wish(Wish::Serve);
    }

    /// When this returns without an error, it is parked.
    pub fn park(&self) -> io::Result<()> {
        self.shared.wish(Wish::Park);
        let since = Instant::now();
        let mut state = self.shared.lock();
        while !state.parked {
            let left = PARK_TIMEOUT.saturating_sub(since.elapsed());
            if left.is_zero() || self.thread.is_finished() {
                let why = format!("{} did not finish its request in {PARK_TIMEOUT:?}", self.name);
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// In a forked child: there is no such thread in this process.
    pub fn abandon(self) {
        let Self { shared, thread, .. } = self;
        drop(shared);
        // Neither joined nor detached.
        std::mem::forget(thread);
    }

    /// Ends it once its request is done; nobody waits for that, as it may be a while.
    pub fn quit(self) {
        self.shared.wish(Wish::Quit);
    }
}

fn thread_main(shared: &Shared, endpoint: &Endpoint, ending: &Ending) {
    if let Err(error) = crate::jail::enter_worker() {
        return ending.set(EndReason::Monitor { why: error.to_string() });
    }
    while wait_for_service(shared) {
        if let Err(error) = serve(shared, endpoint) {
            return ending.set(EndReason::Monitor { why: format!("a disk's thread cannot wait: {error}") });
        }
    }
}

/// False: the thread is to end.
fn wait_for_service(shared: &Shared) -> bool {
    let mut state = shared.lock();
    loop {
        match state.wish {
            Wish::Quit => return false,
            Wish::Serve => {
                state.parked = false;
                return true;
            }
            Wish::Park => {
                state.parked = true;
                shared.changed.notify_all();
                state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// Serves until it is woken to look at what is wished.
fn serve(shared: &Shared, endpoint: &Endpoint) -> io::Result<()> {
    let events: Vec<&EventFd> = std::iter::once(&shared.wake).chain(endpoint.queue_fds()).collect();
    loop {
        let mut fds: Vec<PollFd<'_>> =
            events.iter().map(|event| PollFd::from_borrowed_fd(borrowed(event), PollFlags::IN)).collect();
        match rustix::event::poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        let mut readable = fds.iter().map(|fd| !fd.revents().is_empty());
        if readable.next().unwrap_or(false) {
            // Fails when it was read already: then there is nothing to be read.
            let _ = shared.wake.read();
            return Ok(());
        }
        for (queue, _) in readable.enumerate().filter(|(_, readable)| *readable) {
            endpoint.queue_event(queue);
        }
    }
}

#[allow(unsafe_code, reason = "the event's type has no safe way to lend its descriptor")]
fn borrowed(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as `event` lives, and so is what is returned.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use dormouse_snapshot::devices::virtio::DeviceKind;

    use super::*;
    use crate::virtio::testing::{Buffer, Driver, memory};
    use crate::virtio::{Block, BlockBackend, Vsock, VsockHost};

    /// Says that it flushes, and does so when it is told to.
    struct Slow {
        begun: Sender<()>,
        go_on: Receiver<()>,
    }

    impl BlockBackend for Slow {
        fn size_bytes(&self) -> u64 {
            1 << 20
        }

        fn read_at(&mut self, buffer: &mut [u8], _: u64) -> io::Result<()> {
            buffer.fill(7);
            Ok(())
        }

        fn write_at(&mut self, _: &[u8], _: u64) -> io::Result<()> {
            Ok(())
        }

        fn flush(&mut self) -> io::Result<()> {
            self.begun.send(()).unwrap();
            self.go_on.recv().map_err(io::Error::other)
        }
    }

    fn flush_request() -> [Buffer; 2] {
        [Buffer::Out([4_u32.to_le_bytes(), [0; 4], [0; 4], [0; 4]].concat()), Buffer::In(1)]
    }

    struct Bench {
        driver: Driver,
        worker: Worker,
        begun: Receiver<()>,
        go_on: Sender<()>,
    }

    fn bench() -> Bench {
        let ((begun_tx, begun), (go_on, go_on_rx)) = (channel(), channel());
        let memory = memory();
        let slow = Box::new(Slow { begun: begun_tx, go_on: go_on_rx });
        let block = Block::new(slow, false, "slow").unwrap();
        let endpoint = Endpoint::new(Box::new(block), memory.clone()).unwrap();
        let driver = Driver::boot(endpoint, memory, u64::MAX);
        let ending = Arc::new(Ending::new().unwrap());
        let worker = Worker::start("disk0", driver.endpoint.clone(), ending).unwrap();
        Bench { driver, worker, begun, go_on }
    }

    #[test]
    fn a_disk_that_blocks_does_not_block_vsock() {
        let Bench { mut driver, worker, begun, go_on } = bench();
        worker.resume();
        driver.submit(0, &flush_request());
        driver.notify(0);
        begun.recv().unwrap();
        // This thread is the one of all other devices: it looks for the vsock device among all, and serves it.
        let vsock = Vsock::new(VsockHost::default()).unwrap();
        let memory = memory();
        let vsock = Driver::boot(Endpoint::new(Box::new(vsock), memory.clone()).unwrap(), memory, u64::MAX);
        for endpoint in [&driver.endpoint, &vsock.endpoint] {
            assert_eq!(
                endpoint.with_device(|_: &mut Vsock, _| ()).is_some(),
                endpoint.kind() == DeviceKind::Vsock
            );
        }
        assert_eq!(driver.used(0), None, "it is not done");
        go_on.send(()).unwrap();
        worker.park().unwrap();
        assert_eq!(driver.used(0).unwrap().2, [0]);
        worker.quit();
    }

    #[test]
    fn what_was_begun_is_done_when_it_is_parked_and_nothing_is_begun_then() {
        let Bench { mut driver, worker, begun, go_on } = bench();
        driver.submit(0, &flush_request());
        driver.notify(0);
        worker.park().unwrap();
        assert_eq!(driver.used(0), None, "it was not resumed yet");
        for _ in 0..20 {
            worker.resume();
            begun.recv().unwrap();
            std::thread::scope(|scope| {
                let parked = scope.spawn(|| worker.park());
                go_on.send(()).unwrap();
                parked.join().unwrap().unwrap();
            });
            assert_eq!(driver.used(0).unwrap().2, [0]);
            driver.submit(0, &flush_request());
            driver.notify(0);
            assert_eq!(driver.used(0), None);
        }
        worker.quit();
    }

    #[test]
    fn it_goes_when_it_is_told_to() {
        for served in [false, true] {
            let Bench { worker, .. } = bench();
            if served {
                worker.resume();
            }
            let shared = Arc::downgrade(&worker.shared);
            let Worker { shared: ours, thread, .. } = worker;
            ours.wish(Wish::Quit);
            drop(ours);
            thread.join().unwrap();
            assert!(shared.upgrade().is_none());
        }
    }
}
