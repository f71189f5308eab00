//! The bare-metal test kernels of `guests/`, built, loaded, and run. Needs gcc and
//! binutils for x86; skipped, and said so, without, and on KVM where there is none.

#[path = "support/kept.rs"]
mod kept;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use weft_boot::{Format, ImageFile, Protocol, Request, Role, load};
use weft_guest_memory::Ram;
use weft_machine::{
    BackEndChoice, Configuration, End, Machine, MachineError, MachineIo, MachineRequest, OpenDisks,
};

use kept::Kept;
use weft_test_support::skipped;

/// Where the kernels are, built once; nothing when there is no compiler, which is
/// said.
fn kernels() -> Option<PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = FOLDER.get_or_init(build).clone();
    if folder.is_none() {
        skipped(&"no gcc to build the test kernels");
    }
    folder
}

fn build() -> Option<PathBuf> {
    if Command::new("gcc").arg("--version").output().is_err() {
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
    let Some(folder) = kernels() else { return };
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
            linux_parameters: &["nothing", "else"],
            protocol: None,
            acpi: None,
            seed: None,
            limit: None,
        };
        let recognised = load(&ram, &request).unwrap().recognised;
        assert_eq!(recognised.format, format, "{name}");
        assert_eq!(recognised.protocol, protocol, "{name}");
        assert_eq!(recognised.kernel.start, 0x10_0000, "{name}");
        // What is cleared is told by the file, too.
        assert!(recognised.kernel.end >= 0x10_3000, "{name}");
    }
}

/// Runs a kernel until it ends; nothing when the back end cannot be used here.
fn run(kernel: &Path, initrd: &Path, back_end: BackEndChoice) -> Option<(End, String)> {
    let mut configuration = Configuration::new(kernel.into(), 64 << 20);
    configuration.initrd = Some(initrd.into());
    configuration.command_line = "some text".into();
    configuration.back_end = back_end;
    configuration.debug_exit = true;
    let printed = Kept::default();
    let io = MachineIo {
        serial: Box::new(printed.clone()),
        console: None,
        disks: OpenDisks::default(),
        switches: Default::default(),
        checkpoint: Default::default(),
        memory: Default::default(),
    };
    let machine = match Machine::new(&configuration, io) {
        Ok(machine) => machine,
        Err(MachineError::Unusable(reason)) => {
            skipped(&reason);
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let handle = machine.handle();
    handle.request(MachineRequest::Run).unwrap();
    let end = handle.wait(Duration::from_secs(60)).expect("it ends");
    machine.finish();
    Some((end, printed.text()))
}

#[test]
fn each_kernel_finds_what_its_protocol_promises_on_soft() {
    all_kernels(BackEndChoice::Soft);
}

#[test]
fn each_kernel_finds_what_its_protocol_promises_on_kvm() {
    all_kernels(BackEndChoice::Kvm);
}

fn all_kernels(back_end: BackEndChoice) {
    let Some(folder) = kernels() else { return };
    let initrd = folder.join(format!("module-{back_end:?}"));
    std::fs::write(&initrd, "a module").unwrap();
    for (name, protocol) in [
        ("multiboot.elf", "multiboot"),
        ("multiboot.bin", "multiboot"),
        ("pvh.elf", "pvh"),
    ] {
        let kernel = folder.join(name);
        let Some((end, printed)) = run(&kernel, &initrd, back_end) else {
            return;
        };
        assert_eq!(end, End::DebugExit { code: 33 }, "{name}: {printed}");
        let hello = format!("weft-guest: {protocol} hello\n");
        assert!(printed.starts_with(&hello), "{printed}");
        assert!(printed.contains("command line: some text\n"), "{printed}");
        assert!(printed.contains("usable KiB: 65151\n"), "{printed}");
        assert!(printed.ends_with("module: a module\n"), "{printed}");
    }
}
