//! Makes the files that a microVM boots from: `guest FOLDER AGENT`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1);
    let (Some(dir), Some(agent)) = (args.next(), args.next()) else {
        return Err("usage: guest FOLDER AGENT".into());
    };
    let agent = std::fs::read(agent)?;
    let guest = dormouse_image::build_guest(dir.as_ref(), &agent, &mut |line| println!("{line}"))?;
    println!("{}\n{}", guest.kernel().display(), guest.initramfs().display());
    Ok(())
}
