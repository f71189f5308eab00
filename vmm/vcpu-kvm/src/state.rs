//! A vCPU's registers, out of KVM and into it.

use kvm_bindings::{
    CpuId, KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW, Xsave, kvm_debugregs,
    kvm_dtable, kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use weft_vcpu::{CpuState, DescriptorTable, Segment, Undelivered, VcpuError};

use super::shared::Shared;
use super::{calls, failed, msrs};

/// Where XSAVE's header starts; its first word says which components are there.
const XSAVE_HEADER: usize = 512;
/// Legacy region and header.
const XSAVE_MIN: usize = 576;
/// x87 and SSE.
const LEGACY_COMPONENTS: u64 = 3;
/// CR0.PE.
const PROTECTED: u64 = 1;
/// RFLAGS.VM.
const VIRTUAL_8086: u64 = 1 << 17;
/// `rights` of a segment that may be used.
const PRESENT: u16 = 1 << 7;

/// What KVM does not know.
#[derive(Clone, Copy)]
pub(super) struct Beside {
    pub(super) halted: bool,
    pub(super) instructions: u64,
}

pub(super) fn save(vcpu: &VcpuFd, shared: &Shared, beside: Beside) -> Result<CpuState, VcpuError> {
    // First: it puts what a pending exception brings into CR2 and DR6.
    let events = vcpu
        .get_vcpu_events()
        .map_err(failed("KVM_GET_VCPU_EVENTS"))?;
    let regs = vcpu.get_regs().map_err(failed("KVM_GET_REGS"))?;
    let sregs = vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?;
    let debug = vcpu.get_debug_regs().map_err(failed("KVM_GET_DEBUGREGS"))?;
    let xcrs = vcpu.get_xcrs().map_err(failed("KVM_GET_XCRS"))?;
    Ok(CpuState {
        registers: general(&regs),
        rip: regs.rip,
        rflags: regs.rflags,
        cs: segment(&sregs.cs),
        ds: segment(&sregs.ds),
        es: segment(&sregs.es),
        ss: segment(&sregs.ss),
        fs: segment(&sregs.fs),
        gs: segment(&sregs.gs),
        tr: segment(&sregs.tr),
        ldtr: segment(&sregs.ldt),
        gdtr: table(&sregs.gdt),
        idtr: table(&sregs.idt),
        cpl: privilege(&regs, &sregs),
        cr0: sregs.cr0,
        cr2: sregs.cr2,
        cr3: sregs.cr3,
        cr4: sregs.cr4,
        efer: sregs.efer,
        debug: [
            debug.db[0],
            debug.db[1],
            debug.db[2],
            debug.db[3],
            debug.dr6,
            debug.dr7,
        ],
        fpu: read_extended(vcpu, shared.xsave_bytes)?,
        // Register 0 is the only one there is.
        xcr0: xcrs.xcrs[0].value,
        msrs: msrs::read(vcpu, &shared.state_msrs)?,
        tsc_offset: calls::tsc_offset(vcpu)?,
        instructions: beside.instructions,
        interrupt_shadow: events.interrupt.shadow != 0,
        halted: beside.halted,
        nmi_blocked: events.nmi.masked != 0,
        nmi_waits: events.nmi.pending != 0,
        undelivered: undelivered(&events),
    })
}

/// `defaults` are the values after reset of MSRs that `state` does not name.
pub(super) fn restore(
    vcpu: &VcpuFd,
    shared: &Shared,
    defaults: &[(u32, u64)],
    state: &CpuState,
) -> Result<(), VcpuError> {
    let now = vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?;
    vcpu.set_sregs(&special(state, &now))
        .map_err(failed("KVM_SET_SREGS"))?;
    vcpu.set_regs(&kvm_general(state))
        .map_err(failed("KVM_SET_REGS"))?;
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    xcrs.xcrs[0].value = state.xcr0;
    vcpu.set_xcrs(&xcrs).map_err(failed("KVM_SET_XCRS"))?;
    write_extended(vcpu, shared.xsave_bytes, &state.fpu)?;
    let unnamed = defaults
        .iter()
        .filter(|(index, _)| state.msrs.iter().all(|(named, _)| named != index));
    let values: Vec<_> = unnamed.chain(&state.msrs).copied().collect();
    msrs::write(vcpu, &values)?;
    let [db0, db1, db2, db3, dr6, dr7] = state.debug;
    let debug = kvm_debugregs {
        db: [db0, db1, db2, db3],
        dr6,
        dr7,
        ..Default::default()
    };
    vcpu.set_debug_regs(&debug)
        .map_err(failed("KVM_SET_DEBUGREGS"))?;
    // Where it is fixed, the machine's clock knows.
    if shared.fixed_tsc_offset.is_none() {
        calls::set_tsc_offset(vcpu, state.tsc_offset)?;
    }
    vcpu.set_vcpu_events(&events(state))
        .map_err(failed("KVM_SET_VCPU_EVENTS"))
}

/// The order of [`CpuState::registers`], the processor's own.
pub(super) fn general(regs: &kvm_regs) -> [u64; 16] {
    [
        regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
        regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ]
}

/// The reverse of [`general`].
pub(super) fn set_general(registers: [u64; 16], rip: u64, rflags: u64) -> kvm_regs {
    let [
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
    ] = registers;
    kvm_regs {
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rip,
        rflags,
    }
}

fn kvm_general(state: &CpuState) -> kvm_regs {
    set_general(state.registers, state.rip, state.rflags)
}

fn special(state: &CpuState, now: &kvm_sregs) -> kvm_sregs {
    let mut ss = kvm_segment_of(&state.ss);
    if state.cr0 & PROTECTED != 0 && state.rflags & VIRTUAL_8086 == 0 {
        // KVM takes the current privilege level from here.
        ss.dpl = state.cpl & 3;
    }
    kvm_sregs {
        cs: kvm_segment_of(&state.cs),
        ds: kvm_segment_of(&state.ds),
        es: kvm_segment_of(&state.es),
        fs: kvm_segment_of(&state.fs),
        gs: kvm_segment_of(&state.gs),
        ss,
        tr: kvm_segment_of(&state.tr),
        ldt: kvm_segment_of(&state.ldtr),
        gdt: kvm_table(&state.gdtr),
        idt: kvm_table(&state.idtr),
        cr0: state.cr0,
        cr2: state.cr2,
        cr3: state.cr3,
        cr4: state.cr4,
        // The environment's, set before every entry.
        cr8: 0,
        efer: state.efer,
        apic_base: now.apic_base,
        // Goes with the events.
        interrupt_bitmap: [0; 4],
    }
}

fn segment(from: &kvm_segment) -> Segment {
    let bit = |value: u8, place: u32| u16::from(value & 1) << place;
    Segment {
        selector: from.selector,
        base: from.base,
        limit: from.limit,
        rights: u16::from(from.type_ & 0xf)
            | bit(from.s, 4)
            | u16::from(from.dpl & 3) << 5
            | bit(from.present & !from.unusable, 7)
            | bit(from.avl, 12)
            | bit(from.l, 13)
            | bit(from.db, 14)
            | bit(from.g, 15),
    }
}

fn kvm_segment_of(from: &Segment) -> kvm_segment {
    let bit = |place: u32| (from.rights >> place & 1) as u8;
    kvm_segment {
        base: from.base,
        limit: from.limit,
        selector: from.selector,
        type_: (from.rights & 0xf) as u8,
        present: bit(7),
        dpl: (from.rights >> 5 & 3) as u8,
        db: bit(14),
        s: bit(4),
        l: bit(13),
        g: bit(15),
        avl: bit(12),
        unusable: u8::from(from.rights & PRESENT == 0),
        padding: 0,
    }
}

fn table(from: &kvm_dtable) -> DescriptorTable {
    DescriptorTable {
        base: from.base,
        limit: from.limit,
    }
}

fn kvm_table(from: &DescriptorTable) -> kvm_dtable {
    kvm_dtable {
        base: from.base,
        limit: from.limit,
        ..Default::default()
    }
}

fn privilege(regs: &kvm_regs, sregs: &kvm_sregs) -> u8 {
    if sregs.cr0 & PROTECTED == 0 {
        0
    } else if regs.rflags & VIRTUAL_8086 != 0 {
        3
    } else {
        sregs.ss.dpl & 3
    }
}

fn undelivered(events: &kvm_vcpu_events) -> Option<Undelivered> {
    let exception = &events.exception;
    if exception.injected != 0 || exception.pending != 0 {
        return Some(Undelivered::Exception {
            vector: exception.nr,
            error_code: (exception.has_error_code != 0).then_some(exception.error_code),
        });
    }
    if events.nmi.injected != 0 {
        return Some(Undelivered::NonMaskable);
    }
    (events.interrupt.injected != 0).then_some(Undelivered::Interrupt {
        vector: events.interrupt.nr,
        software: events.interrupt.soft != 0,
    })
}

fn events(state: &CpuState) -> kvm_vcpu_events {
    let mut events = kvm_vcpu_events {
        flags: KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SHADOW,
        ..Default::default()
    };
    events.nmi.masked = u8::from(state.nmi_blocked);
    events.nmi.pending = u8::from(state.nmi_waits);
    // KVM's KVM_X86_SHADOW_INT_STI; which of the two it was makes no difference here.
    events.interrupt.shadow = u8::from(state.interrupt_shadow) << 1;
    match state.undelivered {
        None => {}
        Some(Undelivered::NonMaskable) => events.nmi.injected = 1,
        Some(Undelivered::Interrupt { vector, software }) => {
            events.interrupt.injected = 1;
            events.interrupt.nr = vector;
            events.interrupt.soft = u8::from(software);
        }
        Some(Undelivered::Exception { vector, error_code }) => {
            set_exception(&mut events, vector, error_code);
        }
    }
    events
}

/// Makes the exception the next thing that happens.
pub(super) fn set_exception(events: &mut kvm_vcpu_events, vector: u8, error_code: Option<u32>) {
    events.exception.injected = 1;
    events.exception.pending = 0;
    events.exception.nr = vector;
    events.exception.has_error_code = u8::from(error_code.is_some());
    events.exception.error_code = error_code.unwrap_or(0);
}

/// XSAVE's standard format, as long as this KVM's.
pub(super) fn read_extended(vcpu: &VcpuFd, bytes: usize) -> Result<Vec<u8>, VcpuError> {
    let mut area = extended_area(bytes)?;
    // SAFETY: the area has the room that KVM_CAP_XSAVE2 asks for, and nothing here
    // enables further components.
    unsafe { vcpu.get_xsave2(&mut area) }.map_err(failed("KVM_GET_XSAVE2"))?;
    let words = area.as_fam_struct_ref().xsave.region.iter();
    Ok(words
        .chain(area.as_slice())
        .flat_map(|word| word.to_le_bytes())
        .collect())
}

/// Takes FXSAVE's 512 bytes too: then all further components are in their
/// initial state. What this KVM's area has no room for must not be in use.
pub(super) fn write_extended(vcpu: &VcpuFd, bytes: usize, state: &[u8]) -> Result<(), VcpuError> {
    let mut image = state.to_vec();
    if image.len() < XSAVE_MIN {
        image.resize(XSAVE_MIN, 0);
        image[XSAVE_HEADER..XSAVE_HEADER + 8].copy_from_slice(&LEGACY_COMPONENTS.to_le_bytes());
    }
    let mut area = extended_area(bytes)?;
    let mut words = image.chunks_exact(4).map(|word| {
        // chunks_exact gives four bytes.
        u32::from_le_bytes([word[0], word[1], word[2], word[3]])
    });
    // SAFETY: changes no length.
    let region = unsafe { &mut area.as_mut_fam_struct().xsave.region };
    for (place, word) in region.iter_mut().zip(&mut words) {
        *place = word;
    }
    for (place, word) in area.as_mut_slice().iter_mut().zip(&mut words) {
        *place = word;
    }
    // SAFETY: the area has the room that KVM_CAP_XSAVE2 asks for.
    unsafe { vcpu.set_xsave2(&area) }.map_err(failed("KVM_SET_XSAVE"))
}

fn extended_area(bytes: usize) -> Result<Xsave, VcpuError> {
    let more = bytes.saturating_sub(size_of::<kvm_xsave>());
    Xsave::new(more.div_ceil(4)).map_err(|error| VcpuError::Kernel {
        what: "an XSAVE area",
        source: std::io::Error::other(format!("{error:?}")),
    })
}

/// What the vCPU has after KVM made it: MSRs.
pub(super) fn defaults(
    vcpu: &VcpuFd,
    shared: &Shared,
    cpuid: &CpuId,
) -> Result<Vec<(u32, u64)>, VcpuError> {
    vcpu.set_cpuid2(cpuid).map_err(failed("KVM_SET_CPUID2"))?;
    msrs::reset(vcpu, &shared.state_msrs)
}
