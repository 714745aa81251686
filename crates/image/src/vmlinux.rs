//! The kernel inside a bzImage: an ELF file that needs no decompressor of its own to start.
//!
//! Format: `Documentation/arch/x86/boot.rst` of the kernel (`payload_offset`, `payload_length`); the payload is
//! the compressed ELF file followed by its size.

use std::io::Read;

use crate::error::VmlinuxError;

const SETUP_SECTS: usize = 0x1f1;
const BOOT_MAGIC: usize = 0x202;
const VERSION: usize = 0x206;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// The first version of the boot protocol that names the payload.
const VERSION_MIN: u16 = 0x0208;
const SECTOR: usize = 512;
const KERNEL_BYTES_MAX: usize = 256 << 20;
/// The kernel's LZ4 is the legacy format: blocks of at most this, each behind its compressed size.
const LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
const LZ4_BLOCK_BYTES: usize = 8 << 20;
const ELF_MAGIC: [u8; 4] = [0x7f, b'E', b'L', b'F'];

/// Unpacks the ELF kernel; what it is packed with must be gzip, zstd or LZ4.
pub fn extract_vmlinux(bzimage: &[u8]) -> Result<Vec<u8>, VmlinuxError> {
    let payload = payload(bzimage)?;
    let (packed, size) =
        payload.split_at_checked(payload.len().wrapping_sub(4)).ok_or(VmlinuxError::Truncated)?;
    let size: usize = u32_at(size, 0).and_then(|size| size.try_into().ok()).ok_or(VmlinuxError::Truncated)?;
    if size > KERNEL_BYTES_MAX {
        return Err(VmlinuxError::TooLarge { bytes: size, max: KERNEL_BYTES_MAX });
    }
    let kernel = if packed.starts_with(&LZ4_MAGIC) {
        lz4(&packed[LZ4_MAGIC.len()..], size)?
    } else if packed.starts_with(&[0x1f, 0x8b]) {
        stream(flate2::read::GzDecoder::new(packed), size)?
    } else if packed.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let decoder = zstd::stream::read::Decoder::new(packed).map_err(damaged)?;
        stream(decoder.single_frame(), size)?
    } else {
        let magic = packed.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        return Err(VmlinuxError::Compression { magic });
    };
    if !kernel.starts_with(&ELF_MAGIC) {
        return Err(VmlinuxError::NotElf);
    }
    Ok(kernel)
}

fn payload(bzimage: &[u8]) -> Result<&[u8], VmlinuxError> {
    if bzimage.get(BOOT_MAGIC..BOOT_MAGIC + 4) != Some(b"HdrS") {
        return Err(VmlinuxError::NotBzImage);
    }
    let version = bzimage.get(VERSION..VERSION + 2).map(|it| u16::from_le_bytes([it[0], it[1]]));
    if version.is_none_or(|version| version < VERSION_MIN) {
        return Err(VmlinuxError::NotBzImage);
    }
    // 0 means 4, as the first boot loaders had it.
    let sectors = match bzimage[SETUP_SECTS] {
        0 => 4,
        count => usize::from(count),
    };
    let number = |at| u32_at(bzimage, at).and_then(|it| usize::try_from(it).ok());
    let (offset, length) =
        number(PAYLOAD_OFFSET).zip(number(PAYLOAD_LENGTH)).ok_or(VmlinuxError::Truncated)?;
    let start = (sectors + 1) * SECTOR + offset;
    bzimage.get(start..start.saturating_add(length)).ok_or(VmlinuxError::Truncated)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes([four[0], four[1], four[2], four[3]]))
}

fn damaged(error: impl std::fmt::Display) -> VmlinuxError {
    VmlinuxError::Damaged { why: error.to_string() }
}

fn stream(reader: impl Read, size: usize) -> Result<Vec<u8>, VmlinuxError> {
    let mut kernel = Vec::with_capacity(size);
    let read = reader.take(size as u64).read_to_end(&mut kernel).map_err(damaged)?;
    if read == size { Ok(kernel) } else { Err(VmlinuxError::Truncated) }
}

fn lz4(mut packed: &[u8], size: usize) -> Result<Vec<u8>, VmlinuxError> {
    let mut kernel = vec![0; size];
    let mut filled = 0;
    while filled < size {
        let length = u32_at(packed, 0).and_then(|it| usize::try_from(it).ok());
        let block = length.and_then(|length| packed.get(4..length.checked_add(4)?));
        let block = block.ok_or(VmlinuxError::Truncated)?;
        let end = size.min(filled + LZ4_BLOCK_BYTES);
        let count = lz4_flex::block::decompress_into(block, &mut kernel[filled..end]).map_err(damaged)?;
        if count == 0 {
            return Err(VmlinuxError::Truncated);
        }
        filled += count;
        packed = &packed[4 + block.len()..];
    }
    Ok(kernel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As the kernel's build packs it.
    fn bzimage(packed: &[u8], size: usize) -> Vec<u8> {
        let mut image = vec![0; 2 * SECTOR];
        image[SETUP_SECTS] = 1;
        image[BOOT_MAGIC..BOOT_MAGIC + 4].copy_from_slice(b"HdrS");
        image[VERSION..VERSION + 2].copy_from_slice(&0x020f_u16.to_le_bytes());
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&8_u32.to_le_bytes());
        let length = u32::try_from(packed.len() + 4).unwrap();
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        image.extend([0; 8]);
        image.extend(packed);
        image.extend(u32::try_from(size).unwrap().to_le_bytes());
        image.extend([0; 100]);
        image
    }

    fn kernel() -> Vec<u8> {
        let mut kernel = ELF_MAGIC.to_vec();
        kernel.extend((0..9 << 20).map(|at: u32| (at / 7).to_le_bytes()[0]));
        kernel
    }

    fn in_lz4(kernel: &[u8]) -> Vec<u8> {
        let mut packed = LZ4_MAGIC.to_vec();
        for chunk in kernel.chunks(LZ4_BLOCK_BYTES) {
            let block = lz4_flex::block::compress(chunk);
            packed.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
            packed.extend(block);
        }
        packed
    }

    #[test]
    fn every_packing_gives_the_kernel_back() {
        let kernel = kernel();
        let gzip = {
            use std::io::Write;
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(&kernel).unwrap();
            encoder.finish().unwrap()
        };
        let zstd = zstd::stream::encode_all(&kernel[..], 1).unwrap();
        for packed in [in_lz4(&kernel), gzip, zstd] {
            assert_eq!(extract_vmlinux(&bzimage(&packed, kernel.len())).unwrap(), kernel);
        }
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        let check = |image: &[u8]| extract_vmlinux(image).unwrap_err();
        assert!(matches!(check(b""), VmlinuxError::NotBzImage));
        assert!(matches!(check(&bzimage(b"xz is not known", 9)), VmlinuxError::Compression { .. }));
        let text = in_lz4(b"no ELF at all");
        assert!(matches!(check(&bzimage(&text, 13)), VmlinuxError::NotElf));
        let packed = in_lz4(&kernel());
        let cut = &packed[..packed.len() / 2];
        assert!(matches!(check(&bzimage(cut, 9 << 20)), VmlinuxError::Truncated));
        assert!(matches!(check(&bzimage(&packed, 1 << 30)), VmlinuxError::TooLarge { .. }));
    }

    proptest! {
        #[test]
        fn damage_never_panics(at in 0_usize..1200, byte: u8, cut in 0_usize..1200) {
            let small: Vec<u8> = ELF_MAGIC.iter().copied().cycle().take(3000).collect();
            let mut image = bzimage(&in_lz4(&small), small.len());
            if let Some(place) = image.get_mut(at) {
                *place = byte;
            }
            let _ = extract_vmlinux(&image[..cut.min(image.len())]);
            let _ = extract_vmlinux(&image);
        }
    }
}
