//! IN and OUT.

use iced_x86::{Mnemonic, OpKind};

use super::select::{Operands, sized};
use crate::cpu::{Cpu, register};
use crate::op::{Handler, Op, Outcome};

const RAX: u8 = register::RAX as u8;

/// The port: DX where `source` is 1, else an immediate.
fn port(cpu: &Cpu, op: &Op) -> u16 {
    if op.source == 1 {
        cpu.registers[register::RDX] as u16
    } else {
        op.immediate as u16
    }
}

extern "C" fn input<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let port = port(cpu, op);
    attempt!(cpu, cpu.check_port(port, SIZE));
    let value = cpu.port_read(port, SIZE);
    cpu.set::<SIZE>(RAX, value);
    cpu.go_on_or_trap(op)
}

extern "C" fn output<const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let port = port(cpu, op);
    attempt!(cpu, cpu.check_port(port, SIZE));
    let value = cpu.get::<SIZE>(RAX);
    cpu.port_write(port, SIZE, value);
    cpu.go_on_or_trap(op)
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let instruction = operands.instruction;
    let (data, address) = match instruction.mnemonic() {
        Mnemonic::In => (0, 1),
        Mnemonic::Out => (1, 0),
        _ => return None,
    };
    if instruction.op_kind(address) == OpKind::Register {
        op.source = 1;
    } else {
        op.source = 0;
        op.immediate = instruction.immediate(address) & 0xff;
    }
    let size = instruction.op_register(data).size();
    Some(if data == 0 {
        sized!(size, input)
    } else {
        sized!(size, output)
    })
}
