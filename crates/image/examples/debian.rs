//! Builds an image of Debian packages into a folder: `cargo run --example debian -- FOLDER [PACKAGE…]`.

use std::path::Path;

use dormouse_image::{DebianSpec, Images, base_packages};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: debian FOLDER [PACKAGE…]")?;
    let given: Vec<String> = args.collect();
    let packages = if given.is_empty() { base_packages() } else { given };
    let (images, swept) = Images::open(Path::new(&dir))?;
    println!("swept: {swept:?}");
    let spec = DebianSpec::new("bookworm", &packages)?;
    let start = std::time::Instant::now();
    let image =
        images.debian(&spec, &mut |line| println!("{:6.1} s  {line}", start.elapsed().as_secs_f64()))?;
    println!("{:6.1} s  {} files, {} MiB", start.elapsed().as_secs_f64(), image.files, image.bytes >> 20);
    println!("{}", images.rootfs(&image.id).display());
    Ok(())
}
