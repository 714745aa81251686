//! Times what a pause and a resume cost in the store: `cargo run --release --example measure -- FOLDER`.
//!
//! A writer appends a pages file as `runsc checkpoint` does; it is flushed beside it, or after it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

use dormouse_snapshot::{Compat, FileRole, Manifest, Reason};
use dormouse_store::{Cancel, Store};
use dormouse_types::{EngineKind, Generation, RuntimeId, SandboxId, Shape, SnapshotId, TemplateId};

type Done<T> = Result<T, Box<dyn std::error::Error>>;

fn manifest(id: &SnapshotId) -> Manifest {
    Manifest {
        id: id.clone(),
        parent: None,
        sandbox: SandboxId::generate(),
        runtime: RuntimeId::generate(),
        template: TemplateId::generate(),
        engine: EngineKind::Gvisor,
        generation: Generation(1),
        reason: Reason::Pause,
        created_at_ms: 0,
        expires_at_ms: None,
        shape: Shape::default(),
        rootfs: "base".to_owned(),
        memory: true,
        names: Vec::new(),
        labels: BTreeMap::new(),
        compat: Compat::default(),
        files: Vec::new(),
    }
}

/// 2 MiB at a time, aligned for O_DIRECT.
fn write(path: &Path, mib: usize, direct: bool) -> Done<()> {
    const STEP: usize = 2 << 20;
    let mut random = vec![0_u8; STEP + 4096];
    let offset = random.as_ptr().align_offset(4096);
    let mut state = 1_u64;
    for byte in &mut random {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = state.to_le_bytes()[5];
    }
    let flags = if direct { rustix::fs::OFlags::DIRECT.bits() } else { 0 };
    let mut file =
        File::options().write(true).create_new(true).custom_flags(i32::try_from(flags)?).open(path)?;
    for _ in 0..mib / 2 {
        file.write_all(&random[offset..offset + STEP])?;
    }
    Ok(())
}

fn drop_cache(path: &Path) -> Done<()> {
    let file = File::open(path)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

fn one(store: &Store, mib: usize, direct: bool, beside: bool) -> Done<()> {
    let id = SnapshotId::generate();
    let mut draft = store.begin(&id)?;
    if beside {
        draft.flush_while_written("pages.img");
    }
    let start = Instant::now();
    write(&draft.path().join("pages.img"), mib, direct)?;
    let written = start.elapsed();
    draft.publish(manifest(&id), &[("pages.img", FileRole::Memory)])?;
    let published = start.elapsed();
    let path = store.dir(&id).join("pages.img");
    let mut verified = Vec::new();
    for cold in [false, true] {
        if cold {
            drop_cache(&path)?;
        }
        let start = Instant::now();
        store.verify_files(&store.load(&id)?, &Cancel::default())?;
        verified.push(start.elapsed());
    }
    println!(
        "{mib:5} MiB {} flushed {}: write {:6.1} ms, + publish {:6.1} ms; verify warm {:6.1} ms, cold {:6.1} ms",
        if direct { "direct" } else { "cached" },
        if beside { "beside" } else { "after " },
        written.as_secs_f64() * 1e3,
        (published - written).as_secs_f64() * 1e3,
        verified[0].as_secs_f64() * 1e3,
        verified[1].as_secs_f64() * 1e3,
    );
    store.remove(&id)?;
    Ok(())
}

fn main() -> Done<()> {
    let dir = std::env::args().nth(1).ok_or("usage: measure FOLDER")?;
    let (store, _) = Store::open(Path::new(&dir))?;
    for mib in [20, 200, 1024] {
        for (direct, beside) in [(true, true), (true, false), (false, true), (false, false)] {
            for _ in 0..3 {
                one(&store, mib, direct, beside)?;
            }
        }
    }
    Ok(())
}
