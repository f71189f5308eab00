//! A small machine around one vCPU, and guests assembled by hand.
//!
//! Guest-physical memory, which the page tables map to the same linear addresses,
//! 4 KiB by 4 KiB:
//!
//! ```text
//! 0x01000  page tables: one of each upper level, then four page tables (8 MiB)
//! 0x08000  GDT, then TSS
//! 0x09000  IDT
//! 0x0a000  handlers: each stores what it finds at RECORD, and halts
//! 0x10000  the guest's code
//! 0x20000  data
//! 0x30000  stacks: for the code (grows down from here), RSP0, interrupt stack 1
//! ```

#![allow(dead_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use iced_x86::code_asm::CodeAssembler;
use weft_vcpu::{
    Access, CpuModel, CpuState, DescriptorTable, Environment, Exit, Memory, Segment, Unbacked,
};
use weft_vcpu_soft::{Configuration, SoftCpu, SoftMachine};

pub const PAGE: u64 = 4096;
pub const MEMORY: u64 = 8 << 20;
pub const TABLES: u64 = 0x1000;
pub const GDT: u64 = 0x8000;
pub const TSS: u64 = 0x8800;
pub const IDT: u64 = 0x9000;
pub const HANDLERS: u64 = 0xa000;
pub const CODE: u64 = 0x10000;
pub const DATA: u64 = 0x20000;
pub const STACK: u64 = 0x30000;
pub const KERNEL_STACK: u64 = 0x32000;
pub const INTERRUPT_STACK: u64 = 0x34000;
/// Where handlers store RSP.
pub const RECORD: u64 = 0x40000;

pub const KERNEL_CODE: u16 = 0x08;
pub const KERNEL_DATA: u16 = 0x10;
pub const USER_DATA: u16 = 0x1b;
pub const USER_CODE: u16 = 0x23;
pub const CODE_32: u16 = 0x28;
pub const CODE_16: u16 = 0x30;
pub const TASK: u16 = 0x38;
pub const NOT_PRESENT: u16 = 0x48;

pub const PRESENT: u64 = 1;
pub const WRITABLE: u64 = 2;
pub const USER: u64 = 4;
pub const ACCESSED: u64 = 1 << 5;
pub const DIRTY: u64 = 1 << 6;
pub const LARGE: u64 = 1 << 7;
pub const GLOBAL: u64 = 1 << 8;
pub const NO_EXECUTE: u64 = 1 << 63;

/// What a test does with the address of a page.
pub type PageHook = Box<dyn FnMut(u64) + Send>;
/// What a test does when the vCPU does deferred work.
pub type WorkHook = Box<dyn FnMut() + Send>;
/// What a test does with the address in a device and the interrupts that wait.
pub type DeviceHook = Box<dyn FnMut(u64, &mut Vec<u8>) + Send>;

/// Guest memory: plain bytes, and nothing accessible behind them.
pub struct Plain {
    bytes: *mut u8,
    /// Every page has to be asked for before it is written to, and may be waited
    /// for.
    pub strict: AtomicBool,
    /// The same before it is read.
    pub strict_reads: AtomicBool,
    /// How often a page was given for writing.
    pub given: AtomicU64,
    /// Called before a page is given for writing, with its address.
    pub before_giving: Mutex<Option<PageHook>>,
    /// A page with deferred work when its pin is removed.
    pub deferred: Mutex<Option<u64>>,
    /// Called when the vCPU does deferred work.
    pub on_deferred_work: Mutex<Option<WorkHook>>,
}

// SAFETY: the bytes are only accessed as guest memory: by single host accesses.
unsafe impl Send for Plain {}
// SAFETY: the bytes are only accessed as guest memory: by single host accesses.
unsafe impl Sync for Plain {}

impl Plain {
    pub fn new() -> Arc<Self> {
        let size = MEMORY as usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, of which the first part is made accessible.
        let bytes = unsafe {
            let none = std::ptr::null_mut();
            let bytes = libc::mmap(none, size + PAGE as usize, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(bytes, libc::MAP_FAILED);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mprotect(bytes, size, access), 0);
            bytes.cast()
        };
        Arc::new(Self {
            bytes,
            strict: AtomicBool::new(false),
            strict_reads: AtomicBool::new(false),
            given: AtomicU64::new(0),
            before_giving: Mutex::new(None),
            deferred: Mutex::new(None),
            on_deferred_work: Mutex::new(None),
        })
    }

    fn at(&self, address: u64, size: u64) -> *mut u8 {
        assert!(address + size <= MEMORY, "{address:#x}");
        // SAFETY: within the allocation.
        unsafe { self.bytes.add(address as usize) }
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        for (index, &byte) in bytes.iter().enumerate() {
            // SAFETY: within the allocation.
            unsafe { self.at(address + index as u64, 1).write_volatile(byte) };
        }
    }

    pub fn read(&self, address: u64, size: usize) -> Vec<u8> {
        // SAFETY: within the allocation.
        (0..size as u64)
            .map(|index| unsafe { self.at(address + index, 1).read_volatile() })
            .collect()
    }

    pub fn write_u64(&self, address: u64, value: u64) {
        // SAFETY: within the allocation; tests use aligned addresses.
        unsafe { self.at(address, 8).cast::<u64>().write_volatile(value) };
    }

    pub fn read_u64(&self, address: u64) -> u64 {
        // SAFETY: within the allocation; tests use aligned addresses.
        unsafe { self.at(address, 8).cast::<u64>().read_volatile() }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: mapped with this size, and nobody uses it any more.
        unsafe { libc::munmap(self.bytes.cast(), (MEMORY + PAGE) as usize) };
    }
}

impl Memory for Plain {
    fn acquire(&self, page: u64, access: Access) -> Result<*mut u8, Unbacked> {
        if access == Access::Write {
            if let Some(hook) = self.before_giving.lock().unwrap().as_mut() {
                hook(page);
            }
            self.given.fetch_add(1, Ordering::SeqCst);
        }
        if page < MEMORY {
            Ok(self.at(page, PAGE))
        } else {
            Err(Unbacked(page))
        }
    }

    fn held(&self, page: u64, access: Access) -> Option<*mut u8> {
        let strict = match access {
            Access::Read => &self.strict_reads,
            Access::Write => &self.strict,
        };
        if strict.load(Ordering::SeqCst) {
            return None;
        }
        self.acquire(page, access).ok()
    }

    fn unpin_and_check(&self, page: u64) -> bool {
        *self.deferred.lock().unwrap() == Some(page)
    }

    fn do_deferred_work(&self) {
        *self.deferred.lock().unwrap() = None;
        let mut hook = self.on_deferred_work.lock().unwrap();
        hook.as_mut().expect("a test that defers work")();
    }

    fn end(&self) -> u64 {
        MEMORY
    }
}

/// Devices that remember what was asked of them.
#[derive(Default)]
pub struct Devices {
    /// Ports written: number, bytes.
    pub ports: Vec<(u16, Vec<u8>)>,
    /// Registers written: address, bytes.
    pub registers: Vec<(u64, Vec<u8>)>,
    /// Interrupts that wait.
    pub interrupts: Vec<u8>,
    pub nmi: bool,
    pub task_priority: u8,
    /// What was written to IA32_APIC_BASE, the first CPU's.
    pub apic_base: Option<u64>,
    pub now: Option<u64>,
    /// Called whenever a port or register is used, with its address and the
    /// interrupts that wait.
    pub on_access: Option<DeviceHook>,
}

impl Devices {
    fn used(&mut self, address: u64) {
        if let Some(hook) = self.on_access.as_mut() {
            hook(address, &mut self.interrupts);
        }
    }
}

impl Environment for Devices {
    fn set_now(&mut self, tsc: u64) {
        self.now = Some(tsc);
    }

    fn mmio_read(&mut self, address: u64, data: &mut [u8]) {
        self.used(address);
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = (address as u8).wrapping_add(index as u8);
        }
    }

    fn mmio_write(&mut self, address: u64, data: &[u8]) {
        self.used(address);
        self.registers.push((address, data.to_vec()));
    }

    fn port_read(&mut self, port: u16, data: &mut [u8]) {
        self.used(u64::from(port));
        data.fill(port as u8);
    }

    fn port_write(&mut self, port: u16, data: &[u8]) {
        self.used(u64::from(port));
        self.ports.push((port, data.to_vec()));
    }

    fn msr_read(&mut self, index: u32) -> Option<u64> {
        (index == 0x1b).then_some(self.apic_base.unwrap_or(0xfee0_0900))
    }

    fn msr_write(&mut self, index: u32, value: u64) -> bool {
        self.apic_base = Some(value);
        index == 0x1b
    }

    fn interrupt_waits(&mut self) -> bool {
        !self.interrupts.is_empty()
    }

    fn interrupt_take(&mut self) -> Option<u8> {
        (!self.interrupts.is_empty()).then(|| self.interrupts.remove(0))
    }

    fn nmi_take(&mut self) -> bool {
        std::mem::take(&mut self.nmi)
    }

    fn task_priority(&mut self) -> u8 {
        self.task_priority
    }

    fn set_task_priority(&mut self, priority: u8) {
        self.task_priority = priority;
    }
}

/// One vCPU with its memory.
pub struct Guest {
    pub memory: Arc<Plain>,
    pub machine: Arc<SoftMachine>,
    pub cpu: SoftCpu,
    pub devices: Devices,
}

/// What an exception's handler found on its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    pub vector: u8,
    pub error: Option<u64>,
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
    /// Where the frame is.
    pub place: u64,
}

/// Vectors that push an error code.
pub const WITH_ERROR: [u8; 7] = [8, 10, 11, 12, 13, 14, 17];

pub fn assemble(bits: u32, address: u64, write: impl FnOnce(&mut CodeAssembler)) -> Vec<u8> {
    let mut assembler = CodeAssembler::new(bits).unwrap();
    write(&mut assembler);
    assembler.assemble(address).unwrap()
}

fn segment(selector: u16, rights: u16) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        rights,
    }
}

/// The place of the page table entry of a linear address.
pub fn entry(address: u64) -> u64 {
    TABLES + 3 * PAGE + address / PAGE * 8
}

/// Whether this host has what guests of the model V3 execute.
pub fn has_v3() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("lzcnt")
        && is_x86_feature_detected!("movbe")
}

impl Guest {
    pub fn of_model(model: CpuModel, write: impl FnOnce(&mut CodeAssembler)) -> Self {
        let configuration = Configuration {
            model,
            ..Configuration::default()
        };
        Self::with(configuration, write)
    }

    /// A guest in 64-bit mode at level 0 that will run `write`'s code.
    pub fn new(write: impl FnOnce(&mut CodeAssembler)) -> Self {
        Self::with(Configuration::default(), write)
    }

    pub fn with(configuration: Configuration, write: impl FnOnce(&mut CodeAssembler)) -> Self {
        let memory = Plain::new();
        let machine = SoftMachine::new(memory.clone());
        let cpu = SoftCpu::new(&machine, configuration).unwrap();
        let mut guest = Self {
            memory,
            machine,
            cpu,
            devices: Devices::default(),
        };
        guest.tables();
        guest.descriptors();
        guest.handlers();
        guest.memory.write(CODE, &assemble(64, CODE, write));
        let state = guest.long_mode();
        guest.cpu.restore(&state);
        guest
    }

    /// Maps all memory to itself, for everybody.
    fn tables(&self) {
        let all = PRESENT | WRITABLE | USER;
        for level in 0..2 {
            self.memory
                .write_u64(TABLES + level * PAGE, (TABLES + (level + 1) * PAGE) | all);
        }
        for table in 0..MEMORY >> 21 {
            let place = TABLES + (3 + table) * PAGE;
            self.memory
                .write_u64(TABLES + 2 * PAGE + 8 * table, place | all);
            for index in 0..512 {
                let page = (table * 512 + index) * PAGE;
                self.memory.write_u64(place + 8 * index, page | all);
            }
        }
    }

    fn descriptors(&self) {
        let task_low = 0x67 | (TSS & 0xff_ffff) << 16 | 0x89 << 40;
        let table = [
            0,
            0x00af_9b00_0000_ffff,
            0x00cf_9300_0000_ffff,
            0x00cf_f300_0000_ffff,
            0x00af_fb00_0000_ffff,
            0x00cf_9b00_0000_ffff,
            0x0000_9b00_0000_ffff,
            task_low,
            0,
            0x00cf_1300_0000_ffff,
        ];
        for (index, value) in table.into_iter().enumerate() {
            self.memory.write_u64(GDT + 8 * index as u64, value);
        }
        self.memory.write(TSS + 4, &KERNEL_STACK.to_le_bytes());
        self.memory.write(TSS + 36, &INTERRUPT_STACK.to_le_bytes());
        // The map of ports starts behind the segment's end: no port is allowed.
        self.memory.write(TSS + 0x66, &0x68_u16.to_le_bytes());
    }

    /// A handler for each vector, which leaves RSP and the vector at RECORD, and
    /// halts.
    fn handlers(&self) {
        for vector in 0..=255_u8 {
            let place = HANDLERS + u64::from(vector) * 32;
            let code = assemble(64, place, |a| {
                use iced_x86::code_asm::*;
                a.mov(qword_ptr(RECORD), rsp).unwrap();
                a.mov(byte_ptr(RECORD + 8), i32::from(vector)).unwrap();
                a.hlt().unwrap();
            });
            assert!(code.len() <= 32);
            self.memory.write(place, &code);
            self.gate(vector, place, 0, 0x8e);
        }
        self.memory.write(RECORD + 8, &[0xff]);
    }

    /// An interrupt gate: handler, interrupt stack, type with level.
    pub fn gate(&self, vector: u8, handler: u64, stack: u8, kind: u8) {
        let low = handler & 0xffff
            | u64::from(KERNEL_CODE) << 16
            | u64::from(stack) << 32
            | u64::from(kind) << 40
            | (handler >> 16 & 0xffff) << 48;
        let place = IDT + 16 * u64::from(vector);
        self.memory.write_u64(place, low);
        self.memory.write_u64(place + 8, handler >> 32);
    }

    /// At the start of the code, at level 0.
    pub fn long_mode(&self) -> CpuState {
        CpuState {
            rip: CODE,
            registers: std::array::from_fn(|index| if index == 4 { STACK } else { 0 }),
            cs: segment(KERNEL_CODE, 0xa09b),
            ds: segment(KERNEL_DATA, 0xc093),
            es: segment(KERNEL_DATA, 0xc093),
            ss: segment(KERNEL_DATA, 0xc093),
            fs: segment(0, 0),
            gs: segment(0, 0),
            tr: Segment {
                selector: TASK,
                base: TSS,
                limit: 0x67,
                rights: 0x8b,
            },
            gdtr: DescriptorTable {
                base: GDT,
                limit: 0x4f,
            },
            idtr: DescriptorTable {
                base: IDT,
                limit: 0xfff,
            },
            cr0: 0x8001_0033,
            cr3: TABLES,
            cr4: 0x6b0,
            efer: 0xd01,
            ..CpuState::reset()
        }
    }

    /// The same with XSAVE and all of its components on, where the model has them.
    pub fn with_avx(&self) -> CpuState {
        let state = self.long_mode();
        CpuState {
            cr4: state.cr4 | 1 << 18,
            xcr0: 7,
            ..state
        }
    }

    /// The same at level 3.
    pub fn user_mode(&self) -> CpuState {
        CpuState {
            cpl: 3,
            cs: segment(USER_CODE, 0xa0fb),
            ss: segment(USER_DATA, 0xc0f3),
            ds: segment(USER_DATA, 0xc0f3),
            es: segment(USER_DATA, 0xc0f3),
            ..self.long_mode()
        }
    }

    /// Runs until the vCPU comes back.
    pub fn run(&mut self) -> Exit {
        self.cpu.run(&mut self.devices)
    }

    /// Runs until HLT; the state then.
    pub fn halts(&mut self) -> CpuState {
        assert_eq!(self.run(), Exit::Halted);
        self.cpu.save()
    }

    /// Runs until HLT in the handler of an exception.
    pub fn faults(&mut self) -> Frame {
        assert_eq!(self.run(), Exit::Halted);
        self.frame().expect("an exception")
    }

    /// What the last exception's handler found.
    pub fn frame(&self) -> Option<Frame> {
        let vector = self.memory.read(RECORD + 8, 1)[0];
        if vector == 0xff {
            return None;
        }
        let place = self.memory.read_u64(RECORD);
        let mut words = (0..6).map(|index| self.memory.read_u64(place + 8 * index));
        let error = WITH_ERROR.contains(&vector).then(|| words.next().unwrap());
        let mut word = || words.next().unwrap();
        Some(Frame {
            vector,
            error,
            rip: word(),
            cs: word(),
            rflags: word(),
            rsp: word(),
            ss: word(),
            place,
        })
    }

    /// Replaces the rights of a page, keeping where it leads.
    pub fn protect(&self, address: u64, rights: u64) {
        self.memory
            .write_u64(entry(address), address & !0xfff | rights);
    }
}
