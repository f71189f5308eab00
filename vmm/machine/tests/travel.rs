//! A vCPU's state goes from one machine to another, as bytes, in both back ends: nothing
//! that the CPU has is lost. The part with KVM needs /dev/kvm; without, it says that it
//! was skipped, and why.

use std::sync::Arc;

use weft_guest_memory::Ram;
use weft_machine::vcpu::soft::SoftBackEnd;
use weft_test_support::skipped;
use weft_vcpu::encoding::{Decoder, Encoder};
use weft_vcpu::{BackEnd, CpuModel, CpuState, DescriptorTable, Segment};
use weft_vcpu_kvm::KvmBackEnd;
use weft_vcpu_kvm::detect::{Backend, Choice};

const RAM: u64 = 8 << 20;

/// A program in long mode, with a value of its own in each register that takes any.
fn odd() -> CpuState {
    let mut next = 0x0123_4567_89ab_cdef_u64;
    let mut value = || {
        next = next.rotate_left(9) ^ 0x9e37_79b9_7f4a_7c15;
        next
    };
    let address = |value: u64| value & 0x7fff_ffff_f000;
    let data = Segment {
        selector: 0x2b,
        base: 0,
        limit: u32::MAX,
        rights: 0xc0f3,
    };
    let mut fpu = vec![0; 512];
    fpu[0..2].copy_from_slice(&0x027f_u16.to_le_bytes());
    fpu[24..28].copy_from_slice(&0x1fa0_u32.to_le_bytes());
    // MXCSR_MASK, then registers: ten bytes of each of the x87's, all of SSE's.
    fpu[28..32].copy_from_slice(&0xffff_u32.to_le_bytes());
    for (at, byte) in fpu.iter_mut().enumerate().take(416).skip(32) {
        if at >= 160 || at % 16 < 10 {
            *byte = value() as u8;
        }
    }
    CpuState {
        registers: std::array::from_fn(|_| value()),
        rip: address(value()) + 0x123,
        // CF, reserved, PF, ZF, IF, DF, OF, AC, ID.
        rflags: 0x24_0e47,
        cs: Segment {
            selector: 0x33,
            rights: 0xa0fb,
            ..data
        },
        ds: data,
        es: data,
        ss: data,
        fs: Segment {
            base: address(value()),
            ..data
        },
        gs: Segment {
            base: address(value()) + 8,
            ..data
        },
        tr: Segment {
            selector: 0x40,
            base: address(value()),
            limit: 0x206f,
            rights: 0x8b,
        },
        ldtr: Segment {
            selector: 0,
            base: 0,
            limit: 0xffff,
            rights: 0x82,
        },
        gdtr: DescriptorTable {
            base: address(value()),
            limit: 0x7f,
        },
        idtr: DescriptorTable {
            base: address(value()),
            limit: 0xfff,
        },
        cpl: 3,
        cr0: 0x8005_0033,
        cr2: value(),
        cr3: 0x5000,
        // PAE, PGE, OSFXSR, OSXMMEXCPT.
        cr4: 0x6a0,
        // SCE, LME, LMA, NXE.
        efer: 0xd01,
        debug: [
            address(value()),
            address(value()) + 1,
            address(value()) + 2,
            address(value()) + 3,
            0xffff_4ff1,
            0x400,
        ],
        fpu,
        msrs: vec![
            (0x277, 0x0007_0406_0007_0406),
            (0x174, 0x10),
            (0x175, address(value())),
            (0x176, address(value())),
            (0xc000_0081, 0x0023_0010_0000_0000),
            (0xc000_0082, address(value())),
            (0xc000_0083, address(value())),
            (0xc000_0084, 0x4_7700),
            (0xc000_0102, address(value())),
        ],
        tsc_offset: 0,
        interrupt_shadow: true,
        halted: true,
        nmi_blocked: true,
        ..CpuState::reset()
    }
}

fn carried(state: &CpuState) -> CpuState {
    let mut encoder = Encoder::default();
    state.encode(&mut encoder);
    let bytes = encoder.finish();
    let mut decoder = Decoder::new(&bytes);
    let state = CpuState::decode(&mut decoder).unwrap();
    decoder.finish().unwrap();
    state
}

/// From one of the back ends' machines to another.
fn travel(mut make: impl FnMut() -> Box<dyn BackEnd>) {
    let (near, far) = (make(), make());
    let odd = odd();
    let mut source = near.create(1).unwrap();
    source.restore(&odd).unwrap();
    let left = source.save().unwrap();
    // The back end takes what a CPU has; this much every one has.
    assert_eq!(
        (left.registers, left.rip, left.rflags),
        (odd.registers, odd.rip, odd.rflags)
    );
    assert_eq!(
        (left.fs, left.gs, left.gdtr, left.idtr),
        (odd.fs, odd.gs, odd.gdtr, odd.idtr)
    );
    assert_eq!(
        (left.cr2, left.cr3, left.efer),
        (odd.cr2, odd.cr3, odd.efer)
    );
    assert_eq!(left.debug, odd.debug);
    assert_eq!(left.fpu[160..416], odd.fpu[160..416]);
    assert_eq!(
        (left.halted, left.interrupt_shadow, left.nmi_blocked),
        (true, true, true)
    );
    for (index, value) in &odd.msrs {
        let kept = left.msrs.iter().find(|(kept, _)| kept == index);
        assert_eq!(kept, Some(&(*index, *value)), "MSR {index:#x}");
    }
    let mut target = far.create(1).unwrap();
    // A vCPU was there before.
    target.restore(&CpuState::started_at(7)).unwrap();
    target.restore(&carried(&left)).unwrap();
    let arrived = target.save().unwrap();
    assert_eq!(arrived, left);
    // And back.
    source.restore(&CpuState::started_at(9)).unwrap();
    source.restore(&carried(&arrived)).unwrap();
    assert_eq!(source.save().unwrap(), left);
}

#[test]
fn a_software_vcpu_arrives_as_it_left() {
    for model in CpuModel::ALL {
        if !model.missing(&weft_wire::cpu::features()).is_empty() {
            skipped(&format!("this host's CPU is not {model}"));
            continue;
        }
        travel(|| {
            let memory = Arc::new(Ram::new(RAM).unwrap());
            let back_end = SoftBackEnd::new(memory, model, 2, false);
            Box::new(back_end.with_tsc_hz(2_000_000_000))
        });
    }
}

#[test]
fn a_vcpu_in_kvm_arrives_as_it_left() {
    let host = match Backend::choose(Some(Backend::Kvm)) {
        Ok(Choice {
            host: Some(host), ..
        }) => host,
        Ok(_) => return skipped(&"KVM was not chosen"),
        Err(error) => return skipped(&error),
    };
    let rams: Vec<Ram> = (0..2).map(|_| Ram::new(RAM).unwrap()).collect();
    let mut rams = rams.iter();
    travel(|| Box::new(KvmBackEnd::new(&host, rams.next().unwrap(), 2).unwrap()));
}
