//! The bare-metal test kernels of `guests/`, built and loaded. Needs gcc and
//! binutils for x86; skipped, and said so, without.

use std::path::PathBuf;
use std::process::Command;

use weft_vmm::boot::{Format, ImageFile, Protocol, Request, Role, load};
use weft_vmm::memory::Ram;

/// Builds the kernels; nothing when there is no compiler.
fn build() -> Option<PathBuf> {
    if Command::new("gcc").arg("--version").output().is_err() {
        eprintln!("skipped: no gcc to build the test kernels");
        return None;
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("boot-guests");
    std::fs::create_dir_all(&folder).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/guests/build.sh");
    let status = Command::new("sh")
        .arg(script)
        .arg(&folder)
        .status()
        .unwrap();
    assert!(status.success());
    Some(folder)
}

#[test]
fn each_kernel_is_started_by_its_protocol() {
    let Some(folder) = build() else { return };
    for (name, format, protocol) in [
        ("multiboot.elf", Format::Elf, Protocol::Multiboot),
        ("multiboot.bin", Format::Flat, Protocol::Multiboot),
        ("pvh.elf", Format::Elf, Protocol::Pvh),
    ] {
        let kernel = ImageFile::open(Role::Kernel, &folder.join(name)).unwrap();
        let ram = Ram::new(16 << 20).unwrap();
        let request = Request {
            kernel: &kernel,
            initrd: None,
            command_line: "some text",
            protocol: None,
            acpi: None,
            seed: None,
        };
        let recognised = load(&ram, &request).unwrap().recognised;
        assert_eq!(recognised.format, format, "{name}");
        assert_eq!(recognised.protocol, protocol, "{name}");
        assert_eq!(recognised.kernel.start, 0x10_0000, "{name}");
        // What is cleared is told by the file, too.
        assert!(recognised.kernel.end >= 0x10_3000, "{name}");
    }
}
