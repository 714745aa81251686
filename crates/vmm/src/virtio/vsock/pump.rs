//! Packets: from the guest to the streams, and from the streams to the guest.

use dormouse_snapshot::devices::virtio::PortPair;

use super::packet::{HEADER_BYTES, Header, Op, TYPE_STREAM};
use super::stream::{Phase, Stream};
use super::{
    CARRIER_BUF_ALLOC, CARRIER_PORT, GUEST_CID, HOST_CID, RECEIVE, RESETS_MAX, Reset, TRANSMIT, Vsock,
};
use crate::memory::GuestMemory;
use crate::virtio::device::{DeviceError, Progress, Rings};
use crate::virtio::queue::{Chain, VirtQueue};

/// How far the guest's packets were taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    All,
    More,
    /// Not before the guest has taken its resets.
    Stalled,
}

impl Vsock {
    /// Moves what can be moved, for one turn.
    pub(super) fn pump(&mut self, rings: &mut Rings) -> Result<Progress, DeviceError> {
        let taken = self.take_packets(rings)?;
        // Twice: reading a host's end to its end may owe the guest a reset.
        self.settle();
        let _ = self.give_packets(rings)?;
        self.settle();
        let given = self.give_packets(rings)?;
        // What was left because of owed resets goes on once those are given.
        let stalled = taken == Taken::Stalled && self.resets.len() < RESETS_MAX;
        let more = taken == Taken::More || stalled;
        Ok(if more { Progress::More } else { given })
    }

    /// Streams that are over go, and their guest is told.
    fn settle(&mut self) {
        let mut over = Vec::new();
        for (ports, stream) in &mut self.streams {
            stream.flush();
            if stream.is_over() {
                over.push((*ports, stream.owed.request));
            }
        }
        for (ports, never_asked) in over {
            self.remove(ports);
            if !never_asked {
                self.resets.push_back(Reset { ports, kind: TYPE_STREAM });
            }
        }
    }

    fn take_packets(&mut self, rings: &mut Rings) -> Result<Taken, DeviceError> {
        let budget = rings.queues.get(TRANSMIT).map_or(0, VirtQueue::size);
        let mut taken = 0;
        let progress = loop {
            if taken == budget {
                break Taken::More;
            }
            if self.resets.len() >= RESETS_MAX {
                break Taken::Stalled;
            }
            let Some(chain) = rings.pop(TRANSMIT)? else { break Taken::All };
            self.take_packet(&rings.memory, &chain)?;
            rings.push_used(TRANSMIT, &chain, 0)?;
            taken += 1;
        };
        if taken > 0 {
            rings.signal(TRANSMIT)?;
        }
        Ok(progress)
    }

    fn take_packet(&mut self, memory: &GuestMemory, chain: &Chain) -> Result<(), DeviceError> {
        let broken = |source| DeviceError::Queue { index: TRANSMIT, source };
        let mut bytes = [0; HEADER_BYTES];
        chain.read(memory, 0, &mut bytes).map_err(broken)?;
        let header = Header::decode(&bytes);
        // Whoever it is for, it is not here; nobody would understand an answer.
        if header.src_cid != GUEST_CID || header.dst_cid != HOST_CID {
            return Ok(());
        }
        let ports = PortPair { guest: header.src_port, host: header.dst_port };
        let op = Op::from_code(header.op).filter(|_| header.kind == TYPE_STREAM);
        if let Some(stream) = self.streams.get_mut(&ports) {
            stream.guest_counters(header.buf_alloc, header.fwd_cnt);
        }
        match (op, self.streams.get_mut(&ports)) {
            (Some(Op::Request), None) => self.accept_guest(ports, &header),
            // Nothing that one would answer; but a reset of a stream that is owed one settles that.
            (Some(Op::Reset), None) => self.resets.retain(|reset| reset.ports != ports),
            (Some(Op::Reset), Some(stream)) => {
                stream.flush();
                self.remove(ports);
            }
            (Some(Op::Response), Some(stream))
                if stream.phase == Phase::Requested && !stream.owed.request =>
            {
                stream.established(ports.host);
            }
            (Some(Op::Data), Some(stream)) => {
                let fits = header.len as usize <= chain.readable_bytes as usize - HEADER_BYTES;
                if fits && stream.admits(header.len) {
                    Self::take_data(&mut self.bounce, stream, memory, chain, header.len as usize)
                        .map_err(broken)?;
                } else {
                    stream.break_off();
                }
            }
            (Some(Op::Shutdown), Some(stream)) => stream.guest_shutdown(header.flags),
            (Some(Op::CreditUpdate), Some(_)) => {}
            (Some(Op::CreditRequest), Some(stream)) => {
                stream.owed.credit_update |= stream.phase == Phase::Established;
            }
            (_, Some(stream)) => stream.break_off(),
            (_, None) => self.resets.push_back(Reset { ports, kind: header.kind }),
        }
        Ok(())
    }

    fn take_data(
        bounce: &mut [u8],
        stream: &mut Stream,
        memory: &GuestMemory,
        chain: &Chain,
        len: usize,
    ) -> Result<(), crate::virtio::queue::QueueError> {
        let mut done = 0;
        while done < len {
            let part = (len - done).min(bounce.len());
            chain.read(memory, HEADER_BYTES + done, &mut bounce[..part])?;
            stream.take(&bounce[..part]);
            done += part;
        }
        Ok(())
    }

    /// The guest asks for a port of the host: only the carrier's is there, and only once.
    fn accept_guest(&mut self, ports: PortPair, header: &Header) {
        let host = if ports.host == CARRIER_PORT { self.parked.take() } else { None };
        let Some(host) = host else {
            return self.resets.push_back(Reset { ports, kind: header.kind });
        };
        let mut stream = Stream::accepted(host, CARRIER_BUF_ALLOC);
        stream.guest_counters(header.buf_alloc, header.fwd_cnt);
        self.streams.insert(ports, stream);
    }

    fn give_packets(&mut self, rings: &mut Rings) -> Result<Progress, DeviceError> {
        let budget = rings.queues.get(RECEIVE).map_or(0, VirtQueue::size);
        let mut given = 0;
        let progress = loop {
            if given == budget {
                break Progress::More;
            }
            if self.resets.is_empty() && !self.streams.values().any(Stream::has_outgoing) {
                break Progress::Done;
            }
            let Some(chain) = rings.pop(RECEIVE)? else { break Progress::Done };
            let Some(room) = (chain.writable_bytes as usize).checked_sub(HEADER_BYTES) else {
                return Err(DeviceError::Request("a vsock buffer has no room for a header"));
            };
            let Some((header, bytes)) = self.next_packet(room) else {
                rings.undo_pop(RECEIVE);
                break Progress::Done;
            };
            let broken = |source| DeviceError::Queue { index: RECEIVE, source };
            chain.write(&rings.memory, 0, &header.encode()).map_err(broken)?;
            chain.write(&rings.memory, HEADER_BYTES, &self.bounce[..bytes]).map_err(broken)?;
            let written = u32::try_from(HEADER_BYTES + bytes).unwrap_or(u32::MAX);
            rings.push_used(RECEIVE, &chain, written)?;
            given += 1;
        };
        if given > 0 {
            rings.signal(RECEIVE)?;
        }
        Ok(progress)
    }

    /// The next packet for the guest, of the stream whose turn it is; its data is in `bounce`.
    fn next_packet(&mut self, room: usize) -> Option<(Header, usize)> {
        if let Some(Reset { ports, kind }) = self.resets.pop_front() {
            let header = Header { kind, op: Op::Reset as u16, ..header(ports) };
            return Some((header, 0));
        }
        let room = room.min(self.bounce.len());
        for _ in 0..self.streams.len() {
            let ports = self.next_turn()?;
            let Some(stream) = self.streams.get_mut(&ports) else { continue };
            let Some((op, flags, bytes)) = stream.next_packet(&mut self.bounce[..room]) else { continue };
            stream.credit.told();
            stream.owed.credit_update = false;
            let header = Header {
                op: op as u16,
                flags,
                len: u32::try_from(bytes).unwrap_or(0),
                buf_alloc: stream.credit.buf_alloc,
                fwd_cnt: stream.credit.fwd_cnt,
                ..header(ports)
            };
            return Some((header, bytes));
        }
        None
    }

    fn next_turn(&mut self) -> Option<PortPair> {
        use std::ops::Bound::{Excluded, Unbounded};
        let mut later = self.streams.range((Excluded(self.turn), Unbounded));
        let ports = later.next().or_else(|| self.streams.iter().next()).map(|(ports, _)| *ports)?;
        self.turn = ports;
        Some(ports)
    }
}

fn header(ports: PortPair) -> Header {
    Header {
        src_cid: HOST_CID,
        dst_cid: GUEST_CID,
        src_port: ports.host,
        dst_port: ports.guest,
        kind: TYPE_STREAM,
        ..Header::default()
    }
}
