//! The header of a vsock packet (VIRTIO 1.2, 5.10.6).

pub const HEADER_BYTES: usize = 44;
pub const TYPE_STREAM: u16 = 1;
/// Flags of `Op::Shutdown`.
pub const SHUTDOWN_RECEIVE: u32 = 1;
pub const SHUTDOWN_SEND: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Request = 1,
    Response = 2,
    Reset = 3,
    Shutdown = 4,
    Data = 5,
    CreditUpdate = 6,
    CreditRequest = 7,
}

impl Op {
    const ALL: [Self; 7] = [
        Self::Request,
        Self::Response,
        Self::Reset,
        Self::Shutdown,
        Self::Data,
        Self::CreditUpdate,
        Self::CreditRequest,
    ];

    /// `None`: the specification does not know it.
    #[must_use]
    pub fn from_code(code: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as u16 == code)
    }
}

/// All fields as they are on the wire; of a guest's packet none is to be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Header {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    pub len: u32,
    pub kind: u16,
    pub op: u16,
    pub flags: u32,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
}

impl Header {
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&self.src_cid.to_le_bytes());
        put(&self.dst_cid.to_le_bytes());
        put(&self.src_port.to_le_bytes());
        put(&self.dst_port.to_le_bytes());
        put(&self.len.to_le_bytes());
        put(&self.kind.to_le_bytes());
        put(&self.op.to_le_bytes());
        put(&self.flags.to_le_bytes());
        put(&self.buf_alloc.to_le_bytes());
        put(&self.fwd_cnt.to_le_bytes());
        bytes
    }

    #[must_use]
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        let mut rest = &bytes[..];
        Self {
            src_cid: u64::from_le_bytes(take(&mut rest)),
            dst_cid: u64::from_le_bytes(take(&mut rest)),
            src_port: u32::from_le_bytes(take(&mut rest)),
            dst_port: u32::from_le_bytes(take(&mut rest)),
            len: u32::from_le_bytes(take(&mut rest)),
            kind: u16::from_le_bytes(take(&mut rest)),
            op: u16::from_le_bytes(take(&mut rest)),
            flags: u32::from_le_bytes(take(&mut rest)),
            buf_alloc: u32::from_le_bytes(take(&mut rest)),
            fwd_cnt: u32::from_le_bytes(take(&mut rest)),
        }
    }
}

/// The next `N` bytes; zeros where there are none, which a whole header does not come to.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let Some((field, tail)) = rest.split_first_chunk() else { return [0; N] };
    *rest = tail;
    *field
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_layout_is_the_specifications() {
        let header = Header {
            src_cid: 3,
            dst_cid: 2,
            src_port: 0x1111_1111,
            dst_port: 0x2222_2222,
            len: 0x3333_3333,
            kind: 0x4444,
            op: 0x5555,
            flags: 0x6666_6666,
            buf_alloc: 0x7777_7777,
            fwd_cnt: 0x8888_8888,
        };
        let mut expected = vec![3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
        for (byte, count) in
            [(0x11, 4), (0x22, 4), (0x33, 4), (0x44, 2), (0x55, 2), (0x66, 4), (0x77, 4), (0x88, 4)]
        {
            expected.extend(vec![byte; count]);
        }
        assert_eq!(header.encode()[..], expected);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header_and_the_same_again(
            bytes in prop::collection::vec(any::<u8>(), HEADER_BYTES),
        ) {
            let bytes: [u8; HEADER_BYTES] = bytes.try_into().unwrap();
            prop_assert_eq!(Header::decode(&bytes).encode(), bytes);
        }
    }
}
