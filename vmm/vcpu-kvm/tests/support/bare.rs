//! A bare guest in KVM: memory, a program, and a vCPU in the state that the program
//! wants, without a machine around it.

use iced_x86::code_asm::CodeAssembler;
use vm_memory::{Bytes, GuestAddress};
use weft_guest_memory::Ram;
use weft_vcpu::{CpuState, DescriptorTable, Segment, Vcpu};
use weft_vcpu_kvm::{Host, KvmBackEnd, KvmVcpu};

/// Where a program starts.
pub const CODE: u64 = 0x1_0000;
const STACK: u64 = 0x8_0000;
const IDT: u64 = 0x6000;
const GDT: u64 = 0x7000;
/// Addresses that no memory answers, mapped 1:1 for 2 MiB in long mode.
pub const DEVICE: u64 = 0xd000_0000;

/// 4 MiB of memory, and room for two vCPUs.
pub struct Bare {
    pub ram: Ram,
    pub back_end: KvmBackEnd,
}

impl Bare {
    pub fn new(host: &Host) -> Bare {
        let ram = Ram::new(4 << 20).unwrap();
        let back_end = KvmBackEnd::new(host, &ram, 2).unwrap();
        Bare { ram, back_end }
    }

    pub fn put(&self, address: u64, bytes: &[u8]) {
        self.ram
            .guest()
            .write_slice(bytes, GuestAddress(address))
            .unwrap();
    }

    /// Writes a program of this many bits to `address`.
    pub fn program(&self, address: u64, bits: u32, write: impl FnOnce(&mut CodeAssembler)) {
        let mut code = CodeAssembler::new(bits).unwrap();
        write(&mut code);
        self.put(address, &code.assemble(address).unwrap());
    }

    pub fn vcpu(&self, id: u32, state: &CpuState) -> KvmVcpu {
        let mut vcpu = self.back_end.vcpu(id).unwrap();
        vcpu.restore(state).unwrap();
        vcpu
    }

    /// Long mode at level 0: the memory and what is at `DEVICE` 1:1, also for user
    /// mode; a descriptor table whose gates all lead to `handler`.
    pub fn long_mode(&self, handler: u64) -> CpuState {
        let set = |address: u64, value: u64| self.put(address, &value.to_le_bytes());
        // Present, writable, the user's; a leaf of 2 MiB.
        set(0x1000, 0x2007);
        set(0x2000, 0x3007);
        set(0x3000, 0x87);
        set(0x3008, 0x20_0087);
        set(0x2000 + 3 * 8, 0x4007);
        set(0x4000 + 128 * 8, DEVICE | 0x87);
        set(GDT + 8, 0x00af_9b00_0000_ffff);
        set(GDT + 16, 0x00cf_9300_0000_ffff);
        for vector in 0..256 {
            let gate = handler & 0xffff | 8 << 16 | 0x8e00 << 32 | (handler >> 16 & 0xffff) << 48;
            set(IDT + vector * 16, gate);
            set(IDT + vector * 16 + 8, handler >> 32);
        }
        let mut state = protected_mode();
        state.cs.rights = 0xa09b;
        state.gdtr = DescriptorTable {
            base: GDT,
            limit: 23,
        };
        state.idtr = DescriptorTable {
            base: IDT,
            limit: 4095,
        };
        state.cr0 = 0x8000_0033;
        state.cr3 = 0x1000;
        state.cr4 = 0x620;
        state.efer = 0x500;
        state
    }
}

/// 32-bit protected mode with flat segments.
pub fn protected_mode() -> CpuState {
    let segment = |selector, rights| Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        rights,
    };
    let mut state = CpuState::with_segments(segment(8, 0xc09b), segment(16, 0xc093));
    state.tr.rights = 0x8b;
    state.cr0 = 0x33;
    state.rip = CODE;
    state.registers[4] = STACK;
    state
}
