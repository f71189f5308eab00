//! Generated code against the same instructions run natively. A failing run
//! prints its seed, which `WEFT_SEED` repeats.

mod generator;
mod native;

use std::sync::Arc;

use iced_x86::{Encoder, Mnemonic, OpKind};

use self::generator::Generator;
use self::native::Context;
use super::arena::Arena;
use super::*;
use crate::block::Mode;
use crate::block::{BlockKey, JumpEntry, jump_index};
use crate::cpu::FxArea;
use crate::machine::SoftMachine;
use crate::op::Handler;
use crate::run::Configuration;
use iced_x86::code_asm::*;
use weft_test_support::{Random, seed};
use weft_vcpu::{CpuModel, Memory, Unbacked};

/// As guests of the newest model have it.
const MODE: Mode = Mode(Mode::BITS_64 | Mode::of_model(CpuModel::V3));

/// Guest memory of the tests: data, stack and code pages, wherever the host put
/// them. Linear addresses are those of `native`, guest-physical ones count from 0.
#[repr(C, align(4096))]
struct Pages([[u8; 4096]; PAGES]);

const PAGES: usize = 4;
const STACK: usize = 0;
/// Two pages: windows may cross from the first to the second.
const DATA: usize = 1;
const CODE: usize = 3;
/// The data register's distance from the data's start.
const MIDDLE: u64 = 3000;

struct PlainMemory(*mut Pages);

// SAFETY: each test has its own, and no thread.
unsafe impl Send for PlainMemory {}
// SAFETY: each test has its own, and no thread.
unsafe impl Sync for PlainMemory {}

impl Memory for PlainMemory {
    fn acquire(&self, page: u64, _: Access) -> Result<*mut u8, Unbacked> {
        if page < self.end() {
            Ok(self.0.cast::<u8>().wrapping_add(page as usize))
        } else {
            Err(Unbacked(page))
        }
    }

    fn held(&self, page: u64, access: Access) -> Option<*mut u8> {
        self.acquire(page, access).ok()
    }

    fn end(&self) -> u64 {
        (PAGES * 4096) as u64
    }
}

struct Machine {
    cpu: *mut Cpu,
    native: Box<Pages>,
    guest: Box<Pages>,
    generated: Generated,
    arena: Arena,
}

unsafe extern "C" fn no_handler(_: &mut Cpu, _: &Op) -> Outcome {
    Outcome::Fault
}

fn zeroed_pages() -> Box<Pages> {
    // SAFETY: bytes may all be zero.
    unsafe { Box::<Pages>::new_zeroed().assume_init() }
}

impl Machine {
    fn new() -> Self {
        Self::counting(false)
    }

    fn counting(counts: bool) -> Self {
        let mut guest = zeroed_pages();
        let memory: Arc<dyn Memory> = Arc::new(PlainMemory(&raw mut *guest));
        let machine = SoftMachine::new(memory);
        let cpu = Box::into_raw(Cpu::new(&machine, Configuration::default()).unwrap());
        let mut this = Self {
            cpu,
            native: zeroed_pages(),
            guest,
            generated: Generated::new(counts).unwrap(),
            arena: Arena::new(1 << 16).unwrap(),
        };
        this.map_all();
        this
    }

    fn cpu(&mut self) -> &mut Cpu {
        // SAFETY: allocated and initialised in `new`; exclusively borrowed here.
        unsafe { &mut *self.cpu }
    }

    /// Gives both copies of memory the same bytes.
    fn fill(&mut self, random: &mut Random) {
        for page in DATA..DATA + 2 {
            self.native.0[page] = random.bytes();
            self.guest.0[page] = self.native.0[page];
        }
        self.native.0[STACK] = [0; 4096];
        self.guest.0[STACK] = [0; 4096];
    }

    fn data_differs(&self) -> bool {
        self.native.0[DATA..DATA + 2] != self.guest.0[DATA..DATA + 2]
    }

    /// Linear address of a page.
    fn linear(&self, page: usize) -> u64 {
        self.native.0[page].as_ptr() as u64
    }

    fn map_all(&mut self) {
        for page in 0..PAGES {
            let linear = self.linear(page);
            let host = self.guest.0[page].as_mut_ptr();
            for class in 0..2 {
                self.cpu().tlbs[class].fill(linear, host, page as u64 * 4096, false, page != CODE);
            }
        }
    }

    /// The block at an offset of the code page, up to the first branch.
    fn block(&mut self, offset: usize) -> *mut Block {
        assert!(offset < 4096, "no block outside the code page is ever next");
        let key = BlockKey {
            physical: (CODE * 4096 + offset) as u64,
            mode: MODE,
        };
        if let Some(block) = self.cpu().code.find(key) {
            return block;
        }
        let page = self.guest.0[CODE];
        let mut decoder = MODE.decoder(&page[offset..], 0);
        let mut count = 0;
        loop {
            let instruction = decoder.decode();
            assert!(!instruction.is_invalid());
            count += 1;
            if instruction.flow_control() != iced_x86::FlowControl::Next {
                break;
            }
        }
        let op = Op {
            handler: no_handler as Handler,
            immediate: 0,
            displacement: 0,
            destination: 0,
            source: 0,
            base: 0,
            index: 0,
            scale: 0,
            segment: 0,
            length: 0,
            extra: 0,
            offset: 0,
        };
        let ops = vec![op; count].into();
        let bytes = page[offset..offset + decoder.position()].into();
        let block = Block::new(key, None, count as u32, ops, bytes, Box::new([]));
        self.cpu().code.insert(block)
    }

    /// The same with code.
    fn translated(&mut self, offset: usize) -> *mut Block {
        let block = self.block(offset);
        // SAFETY: the cache owns it until it is cleared, and no test runs it then.
        unsafe {
            if (*block).code.is_null() {
                let code = self.generated.translate(&*self.cpu, &*block).unwrap();
                let Translated::Code(code) = code else {
                    panic!("a block of 64-bit code: {code:?}");
                };
                (*block).code = code;
            }
        }
        block
    }

    /// Decodes the blocks that can be reached directly from an offset, as the
    /// interpreter would have; `random` says how often each was executed.
    fn decode_all(&mut self, offset: usize, random: &mut Random) {
        let mut open = vec![offset];
        let mut known = Vec::new();
        while let Some(offset) = open.pop() {
            if known.contains(&offset) || offset >= 4096 {
                continue;
            }
            known.push(offset);
            let block = self.block(offset);
            // SAFETY: see `translated`.
            let block = unsafe { &mut *block };
            block.executions = random.below(3) as u32;
            let last = block.instructions(offset as u64).last().unwrap();
            if last.mnemonic() != Mnemonic::Int3 {
                open.push(last.next_ip() as usize);
                if last.op0_kind() == OpKind::NearBranch64 {
                    open.push(last.near_branch64() as usize);
                }
            }
        }
    }

    /// Runs generated code from an offset of the code page until a handler is
    /// called (INT3 has no template): the index of that instruction.
    fn run(&mut self, offset: usize, context: &mut Context) -> usize {
        Generated::attach(self.cpu());
        let rip = self.linear(CODE) + offset as u64;
        let cpu = self.cpu();
        cpu.fpu = FxArea(context.fpu);
        cpu.registers[..16].copy_from_slice(&context.registers);
        cpu.flags = context.flags;
        cpu.rip = rip;
        let mut lookups = 0;
        let op = loop {
            let offset = self.cpu().rip.wrapping_sub(self.linear(CODE)) as usize;
            let block = self.translated(offset);
            // SAFETY: see `block`; this thread is attached.
            let left = unsafe { self.generated.run(&mut *self.cpu, &*block) };
            match left {
                Left::Handler(outcome, op) => {
                    assert_eq!(outcome, Outcome::Fault);
                    break op;
                }
                Left::Next(None) => {
                    let rip = self.cpu().rip;
                    let offset = rip.wrapping_sub(self.linear(CODE)) as usize;
                    let block = self.translated(offset);
                    let entry = &mut self.cpu().jump_caches[0].entries[jump_index(rip)];
                    *entry = JumpEntry { rip, block };
                    lookups += 1;
                    assert!(lookups < 100, "the jump cache is not used");
                }
                Left::Next(Some(link)) => {
                    let offset = self.cpu().rip.wrapping_sub(self.linear(CODE)) as usize;
                    let next = self.translated(offset);
                    // SAFETY: see `block`.
                    self.generated.link(link, unsafe { &*next });
                }
                Left::Interpret => panic!("no SSE exception is unmasked"),
            }
        };
        let cpu = self.cpu();
        context.fpu = cpu.fpu.0;
        context.registers.copy_from_slice(&cpu.registers[..16]);
        context.flags = cpu.flags & 0xffff;
        // SAFETY: `Cpu::block` is the block whose handler was called.
        let first = unsafe { (*cpu.block).first };
        (op as usize - first as usize) / size_of::<Op>()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // SAFETY: it was boxed in `new`.
        drop(unsafe { Box::from_raw(self.cpu) });
    }
}

/// One sequence both ways; says where they differ.
fn compare(machine: &mut Machine, generator: &mut Generator, length: usize) -> Result<(), String> {
    let sequence = generator.sequence(length);
    let mut code = Vec::new();
    for instruction in &sequence {
        let mut encoder = Encoder::new(64);
        if encoder.encode(instruction, 0).is_err() {
            return Ok(());
        }
        code.extend(encoder.take_buffer());
    }
    machine.fill(&mut generator.random);
    machine.guest.0[CODE][..code.len()].copy_from_slice(&code);
    machine.guest.0[CODE][code.len()] = 0xcc;
    machine.cpu().code.clear();
    machine.generated.flush();
    let before = generator.context(machine);
    let (mut native, mut ours) = (before, before);
    machine.run_native(&code, &mut native);
    let stopped = machine.run(0, &mut ours);
    let data_differs = machine.data_differs();
    let stack_differs = machine.native.0[STACK] != machine.guest.0[STACK];
    let flags = (native.flags ^ ours.flags) & 0xd501;
    native.flags = ours.flags;
    if stopped == length && native == ours && !data_differs && !stack_differs && flags == 0 {
        return Ok(());
    }
    let mut text = format!(
        "stopped at {stopped} of {length}, flags {flags:#x}, data {data_differs}, \
         stack {stack_differs}, sse {}, mxcsr {}\n",
        native.fpu[160..416] != ours.fpu[160..416],
        native.fpu[24..28] != ours.fpu[24..28]
    );
    for (number, (native, ours)) in native.registers.iter().zip(ours.registers).enumerate() {
        if *native != ours {
            text += &format!(
                "register {number}: {:#x} natively {native:#x}, here {ours:#x}\n",
                before.registers[number]
            );
        }
    }
    for instruction in sequence {
        text += &format!("  {instruction:?}\n");
    }
    Err(text)
}

#[test]
fn sequences_do_what_they_do_natively() {
    let seed = seed();
    let mut machine = Machine::new();
    for round in 0..6000 {
        let mut generator =
            Generator::new((seed.wrapping_add(round)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let length = 1 + generator.random.below(12) as usize;
        if let Err(difference) = compare(&mut machine, &mut generator, length) {
            panic!("WEFT_SEED={} {difference}", seed.wrapping_add(round));
        }
    }
}

/// Assembles at the start of the code page, with INT3 as the end, and runs both
/// ways.
fn compare_program(counts: bool, write: impl FnOnce(&mut CodeAssembler)) -> (Machine, Context) {
    let mut assembler = CodeAssembler::new(64).unwrap();
    write(&mut assembler);
    let mut machine = Machine::counting(counts);
    machine.cpu().set_budget(None);
    let mut generator = Generator::new(1);
    let context = generator.context(&machine);
    let context = run_both(&mut machine, &mut assembler, context, &mut generator.random);
    (machine, context.unwrap())
}

fn run_both(
    machine: &mut Machine,
    assembler: &mut CodeAssembler,
    before: Context,
    random: &mut Random,
) -> Result<Context, String> {
    let mut ours = before;
    let code = assembler.assemble(machine.linear(CODE)).unwrap();
    machine.guest.0[CODE][..code.len()].copy_from_slice(&code);
    machine.guest.0[CODE][code.len()] = 0xcc;
    machine.decode_all(0, random);
    machine.run(0, &mut ours);
    let mut native = before;
    let code = assembler.assemble(machine.native_address()).unwrap();
    machine.run_native(&code, &mut native);
    // Calls push addresses that differ.
    let flags = (native.flags ^ ours.flags) & 0xd501;
    native.flags = ours.flags;
    if native == ours && flags == 0 && !machine.data_differs() {
        return Ok(ours);
    }
    Err(format!(
        "flags {flags:#x}, natively {:x?}, here {:x?}",
        native.registers, ours.registers
    ))
}

/// A program of random pieces that jump among each other.
fn random_program(generator: &mut Generator) -> CodeAssembler {
    let mut a = CodeAssembler::new(64).unwrap();
    let pieces = 3 + generator.random.below(6) as usize;
    let mut labels: Vec<CodeLabel> = (0..=pieces).map(|_| a.create_label()).collect();
    generator.choose_registers();
    for piece in 0..pieces {
        a.set_label(&mut labels[piece]).unwrap();
        a.nop().unwrap();
        for _ in 0..generator.random.below(4) {
            let instruction = loop {
                if let Some(instruction) = generator.instruction() {
                    break instruction;
                }
            };
            a.add_instruction(instruction).unwrap();
        }
        let ahead = piece + 1 + generator.random.below((pieces - piece) as u64) as usize;
        let behind = generator.random.below(piece as u64 + 1) as usize;
        match generator.random.below(8) {
            0 => a.jmp(labels[ahead]).unwrap(),
            1 => a.jnz(labels[ahead]).unwrap(),
            2 => a.jb(labels[ahead]).unwrap(),
            3 => a.jle(labels[ahead]).unwrap(),
            4 => a.jo(labels[ahead]).unwrap(),
            5 => a.js(labels[ahead]).unwrap(),
            6 => {
                a.dec(r14).unwrap();
                a.jg(labels[behind]).unwrap();
            }
            _ => {}
        }
    }
    a.set_label(&mut labels[pieces]).unwrap();
    a.nop().unwrap();
    a
}

#[test]
fn programs_do_what_they_do_natively() {
    let seed = seed();
    for counts in [false, true] {
        let mut machine = Machine::counting(counts);
        for round in 0..2000 {
            let seed = seed.wrapping_add(round);
            let mut generator = Generator::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut program = random_program(&mut generator);
            machine.fill(&mut generator.random);
            machine.cpu().code.clear();
            machine.cpu().jump_caches = Default::default();
            machine.generated.flush();
            machine.cpu().set_budget(None);
            let mut before = generator.context(&machine);
            before.registers[14] = generator.random.below(20);
            let random = &mut generator.random;
            if let Err(difference) = run_both(&mut machine, &mut program, before, random) {
                let mut text = String::new();
                for instruction in program.instructions() {
                    text += &format!("  {instruction:?}\n");
                }
                panic!("WEFT_SEED={seed:#x} {difference}\n{text}");
            }
        }
    }
}

#[test]
fn loops_run_linked() {
    for counts in [false, true] {
        let (mut machine, context) = compare_program(counts, |a| {
            let (mut outer, mut inner, mut skip) =
                (a.create_label(), a.create_label(), a.create_label());
            a.mov(ecx, 1000).unwrap();
            a.xor(eax, eax).unwrap();
            a.set_label(&mut outer).unwrap();
            a.mov(edx, 100).unwrap();
            a.set_label(&mut inner).unwrap();
            a.test(edx, 3).unwrap();
            a.jnz(skip).unwrap();
            a.add(rax, rcx).unwrap();
            a.set_label(&mut skip).unwrap();
            a.add(rax, rdx).unwrap();
            a.dec(edx).unwrap();
            a.jnz(inner).unwrap();
            a.dec(ecx).unwrap();
            a.jnz(outer).unwrap();
        });
        assert_eq!(context.registers[0], 1000 * 5050 + 25 * 500_500);
        if counts {
            let executed = machine.cpu().instructions();
            // The handler's instruction is counted with its block.
            assert_eq!(executed, 2 + 1000 * (1 + 100 * 5 + 25 + 2) + 1);
        }
    }
}

#[test]
fn calls_and_returns_go_through_the_jump_cache() {
    compare_program(false, |a| {
        let (mut fibonacci, mut small, mut end) =
            (a.create_label(), a.create_label(), a.create_label());
        a.mov(edi, 15).unwrap();
        a.call(fibonacci).unwrap();
        a.lea(r11, ptr(fibonacci)).unwrap();
        a.mov(edi, 5).unwrap();
        a.call(r11).unwrap();
        a.mov(qword_ptr(rbx), r11).unwrap();
        a.mov(edi, 6).unwrap();
        a.call(qword_ptr(rbx)).unwrap();
        a.mov(qword_ptr(rbx), 0).unwrap();
        a.xor(r11d, r11d).unwrap();
        a.jmp(end).unwrap();
        a.set_label(&mut fibonacci).unwrap();
        a.cmp(edi, 2).unwrap();
        a.jb(small).unwrap();
        a.push(rdi).unwrap();
        a.dec(edi).unwrap();
        a.call(fibonacci).unwrap();
        a.pop(rdi).unwrap();
        a.push(rax).unwrap();
        a.sub(edi, 2).unwrap();
        a.call(fibonacci).unwrap();
        a.pop(r15).unwrap();
        a.add(rax, r15).unwrap();
        a.ret().unwrap();
        a.set_label(&mut small).unwrap();
        a.mov(eax, edi).unwrap();
        a.ret().unwrap();
        a.set_label(&mut end).unwrap();
        a.xor(r15d, r15d).unwrap();
    });
}

#[test]
fn a_trace_does_not_follow_a_jump_off_its_page() {
    let mut machine = Machine::new();
    // The code page's physical address has bits in common with the next one's:
    // je +0x10b2 from its end would be taken for offset 0xb2 of a page.
    let mut a = CodeAssembler::new(64).unwrap();
    let linear = machine.linear(CODE);
    a.xor(eax, eax).unwrap();
    a.jne(linear + 0x10b2).unwrap();
    a.nop().unwrap();
    let code = a.assemble(linear + 0xff0).unwrap();
    machine.guest.0[CODE][0xff0..0xff0 + code.len()].copy_from_slice(&code);
    machine.guest.0[CODE][0xff0 + code.len()] = 0xcc;
    // What must not be run: mov eax, 7; int3.
    machine.guest.0[CODE][0xb2..0xb8].copy_from_slice(&[0xb8, 7, 0, 0, 0, 0xcc]);
    machine.block(0xb2);
    let mut context = Generator::new(1).context(&machine);
    let head = machine.block(0xff0);
    // SAFETY: the cache owns both blocks until it is cleared.
    let (head, wrong) = unsafe { (&*head, &*machine.block(0xb2)) };
    let asked = std::cell::RefCell::new(Vec::new());
    let find = |offset: i64| {
        asked.borrow_mut().push(offset);
        (offset == 0xb2).then_some(wrong)
    };
    assert_eq!(super::trace::collect(head, &find).unwrap().len(), 2);
    assert!(
        asked.borrow().contains(&0x10b2),
        "the target is off the page"
    );
    machine.run(0xff0, &mut context);
    assert_eq!(context.registers[0], 0);
}

#[test]
fn a_block_that_the_budget_does_not_cover_is_not_begun() {
    let mut machine = Machine::counting(true);
    let mut a = CodeAssembler::new(64).unwrap();
    let mut again = a.create_label();
    a.set_label(&mut again).unwrap();
    a.inc(rax).unwrap();
    a.inc(rcx).unwrap();
    a.jmp(again).unwrap();
    let code = a.assemble(machine.linear(CODE)).unwrap();
    machine.guest.0[CODE][..code.len()].copy_from_slice(&code);
    machine.cpu().budget = 3 * 1000 + 2;
    let block = machine.translated(0);
    Generated::attach(machine.cpu());
    let rip = machine.linear(CODE);
    let cpu = machine.cpu();
    cpu.rip = rip;
    cpu.registers[0] = 0;
    // SAFETY: see `translated`; this thread is attached.
    let left = unsafe { machine.generated.run(&mut *machine.cpu, &*block) };
    assert!(matches!(left, Left::Interpret));
    let cpu = machine.cpu();
    assert_eq!((cpu.registers[0], cpu.budget, cpu.rip), (1000, 2, rip));
}

#[test]
fn a_request_ends_a_loop() {
    let mut machine = Machine::new();
    machine.guest.0[CODE][..2].copy_from_slice(&[0xeb, 0xfe]);
    let block = machine.translated(0);
    let requests = machine.cpu().requests.clone();
    Generated::attach(machine.cpu());
    machine.cpu().rip = machine.linear(CODE);
    let asking = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(5));
        requests.ask(1);
    });
    // SAFETY: see `translated`; this thread is attached.
    let left = unsafe { machine.generated.run(&mut *machine.cpu, &*block) };
    asking.join().unwrap();
    assert!(matches!(left, Left::Next(None)));
    let rip = machine.cpu().rip;
    assert_eq!(rip, machine.linear(CODE));
}
