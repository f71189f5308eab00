//! Every format, and every way to be wrong.

mod damage;
mod formats;
mod refusals;

use super::*;
use crate::test_images::*;
use vm_memory::{Bytes, GuestAddress};

const MEMORY: u64 = 16 << 20;

fn file(role: Role, bytes: Vec<u8>) -> ImageFile {
    ImageFile::from_bytes(role, "made", bytes)
}

/// What a test boots with.
struct Machine {
    ram: Ram,
    kernel: ImageFile,
    initrd: Option<ImageFile>,
    command_line: String,
    linux_parameters: Vec<&'static str>,
    protocol: Option<Protocol>,
    acpi: Option<acpi::Placed>,
    seed: Option<[u8; 32]>,
    limit: Option<u64>,
}

impl Machine {
    fn new(kernel: Vec<u8>) -> Self {
        Self {
            ram: Ram::new(MEMORY).unwrap(),
            kernel: file(Role::Kernel, kernel),
            initrd: Some(file(Role::Initrd, b"an initrd".to_vec())),
            command_line: "console=ttyS0".into(),
            linux_parameters: Vec::new(),
            protocol: None,
            acpi: Some(acpi::Placed {
                rsdp: 0xe_0000,
                range: 0xe_0000..0xe_2000,
            }),
            seed: Some([7; 32]),
            limit: None,
        }
    }

    fn load(&self) -> Result<Loaded, BootError> {
        load(
            &self.ram,
            &Request {
                kernel: &self.kernel,
                initrd: self.initrd.as_ref(),
                command_line: &self.command_line,
                linux_parameters: &self.linux_parameters,
                protocol: self.protocol,
                acpi: self.acpi.as_ref(),
                seed: self.seed.as_ref(),
                limit: self.limit,
            },
        )
    }

    /// What is wrong with the kernel.
    fn refusal(&self) -> ImageError {
        match self.load() {
            Err(BootError::Kernel { source, .. }) => source,
            other => panic!("{other:?}"),
        }
    }

    fn bytes(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.ram
            .guest()
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    }

    fn number(&self, address: u64, length: usize) -> u64 {
        self.bytes(address, length)
            .iter()
            .rev()
            .fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn text(&self, address: u64) -> String {
        let bytes = self.bytes(address, 256);
        let end = bytes.iter().position(|byte| *byte == 0).unwrap();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    }
}
