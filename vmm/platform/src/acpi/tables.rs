//! The tables of fixed layout, and where each lies.

use acpi_tables::Aml;
use acpi_tables::facs::FACS;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::slit::SLIT;
use acpi_tables::xsdt::XSDT;
use weft_guest_memory::{ECAM, IO_APIC, LOCAL_APIC};

use super::power::{RESET, RESET_VALUE, SLEEP_CONTROL, SLEEP_STATUS};
use super::{Description, FACS as FACS_ADDRESS, IO_APIC_ID, Node, dsdt};

const OEM: [u8; 6] = *b"WEFT  ";
const OEM_TABLE: [u8; 8] = *b"WEFTVM  ";
const OEM_REVISION: u32 = 1;
/// Tables start at multiples of it.
const ALIGNMENT: usize = 16;
const HEADER_BYTES: u32 = 36;

/// IAPC_BOOT_ARCH (table 5.11).
const LEGACY_DEVICES: u16 = 1 << 0;
const VGA_NOT_PRESENT: u16 = 1 << 2;
const CMOS_CLOCK_NOT_PRESENT: u16 = 1 << 5;

/// The clock's register for the century.
const CMOS_CENTURY: u8 = 0x32;

/// Entries of the MADT (5.2.12) and the SRAT (5.2.16).
const MADT_LOCAL_APIC: u8 = 0;
const MADT_IO_APIC: u8 = 1;
const MADT_LOCAL_APIC_NMI: u8 = 4;
const SRAT_LOCAL_APIC: u8 = 0;
const SRAT_MEMORY: u8 = 1;
const ENABLED: u32 = 1;
/// Both kinds of NMI entry: every CPU.
const ALL_CPUS: u8 = 0xff;
/// LINT1: where a PC wires the NMI.
const NMI_INPUT: u8 = 1;

/// Distance to another node, where 10 is the distance to itself (5.2.17): a slice
/// of the machine, behind a network. Above 30 (`RECLAIM_DISTANCE`) Linux starts no
/// program on another node and pulls no thread there that wakes (`sd_init`,
/// kernel/sched/topology.c, of 6.1): only its load balancer moves what runs, so
/// that a process stays where its pages are. Memory is the same at any distance:
/// from the own node while it has some, then from the others; to reclaim first
/// (`vm.zone_reclaim_mode`) is off unless the guest wants it.
const REMOTE_DISTANCE: u8 = 40;

/// All tables as they lie in memory from `base`, the RSDP first.
pub fn build(description: &Description, base: u64) -> Vec<u8> {
    // The RSDP is filled in at the end.
    let mut bytes = vec![0; Rsdp::len()];
    let mut put = |table: &dyn Aml| {
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        let address = base + bytes.len() as u64;
        table.to_aml_bytes(&mut bytes);
        address
    };
    let mut dsdt = sdt(*b"DSDT", 2);
    dsdt.append_slice(&dsdt::code(description));
    let dsdt = put(&dsdt);
    let mut addresses = vec![
        put(&fadt(description, dsdt)),
        put(&madt(&description.nodes)),
        put(&mcfg()),
        put(&srat(&description.nodes)),
    ];
    if description.nodes.len() > 1 {
        addresses.push(put(&slit(description.nodes.len())));
    }
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    for address in addresses {
        xsdt.add_entry(address);
    }
    let xsdt = put(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut rsdp);
    bytes[..rsdp.len()].copy_from_slice(&rsdp);
    bytes
}

/// For waking vectors and the global lock, none of which firmware here uses (5.2.10).
pub fn facs() -> Vec<u8> {
    let mut bytes = Vec::new();
    FACS::new().to_aml_bytes(&mut bytes);
    bytes
}

fn sdt(signature: [u8; 4], revision: u8) -> Sdt {
    Sdt::new(
        signature,
        HEADER_BYTES,
        revision,
        OEM,
        OEM_TABLE,
        OEM_REVISION,
    )
}

/// Hardware-reduced, with the registers for sleep and reset (5.2.9).
fn fadt(description: &Description, dsdt: u64) -> impl Aml {
    let port = |port: u16| {
        GAS::new(
            AddressSpace::SystemIo,
            8,
            0,
            AccessSize::ByteAccess,
            u64::from(port),
        )
    };
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        // By its field of 32 bits, which the oldest readers know: it lies below 4 GiB,
        // and the specification wants one of the two fields.
        .firmware_ctrl_32(FACS_ADDRESS as u32)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        // No buttons in fixed registers: the DSDT has one.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    let mut legacy = LEGACY_DEVICES | VGA_NOT_PRESENT;
    if description.real_time_clock {
        fadt.century = CMOS_CENTURY;
    } else {
        legacy |= CMOS_CLOCK_NOT_PRESENT;
    }
    fadt.iapc_boot_arch = legacy.into();
    fadt.reset_reg = port(RESET);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL);
    fadt.sleep_status_reg = port(SLEEP_STATUS);
    fadt.finalize()
}

/// Local APICs, the I/O APIC, the NMI. ISA lines are wired one to one, so there
/// is no override.
fn madt(nodes: &[Node]) -> Sdt {
    let mut madt = sdt(*b"APIC", 5);
    madt.append(LOCAL_APIC as u32);
    // No 8259.
    madt.append(0_u32);
    let cpus: usize = nodes.iter().map(|node| node.cpus.len()).sum();
    let mut entries = Vec::new();
    for cpu in 0..cpus as u8 {
        entries.extend_from_slice(&[MADT_LOCAL_APIC, 8, cpu, cpu]);
        entries.extend_from_slice(&ENABLED.to_le_bytes());
    }
    entries.extend_from_slice(&[MADT_IO_APIC, 12, IO_APIC_ID, 0]);
    entries.extend_from_slice(&(IO_APIC as u32).to_le_bytes());
    entries.extend_from_slice(&0_u32.to_le_bytes());
    entries.extend_from_slice(&[MADT_LOCAL_APIC_NMI, 6, ALL_CPUS, 0, 0, NMI_INPUT]);
    madt.append_slice(&entries);
    madt
}

fn mcfg() -> MCFG {
    let mut mcfg = MCFG::new(OEM, OEM_TABLE, OEM_REVISION);
    mcfg.add_ecam(ECAM, 0, 0, 0);
    mcfg
}

/// Which CPU and which memory is in which node.
fn srat(nodes: &[Node]) -> Sdt {
    let mut srat = sdt(*b"SRAT", 3);
    srat.append(1_u32);
    srat.append(0_u64);
    let mut entries = Vec::new();
    for (number, node) in nodes.iter().enumerate() {
        for cpu in &node.cpus {
            entries.extend_from_slice(&[SRAT_LOCAL_APIC, 16, number as u8, *cpu]);
            entries.extend_from_slice(&ENABLED.to_le_bytes());
            entries.extend_from_slice(&[0; 8]);
        }
        for range in &node.memory {
            entries.extend_from_slice(&[SRAT_MEMORY, 40]);
            entries.extend_from_slice(&(number as u32).to_le_bytes());
            entries.extend_from_slice(&[0; 2]);
            entries.extend_from_slice(&range.start.to_le_bytes());
            entries.extend_from_slice(&(range.end - range.start).to_le_bytes());
            entries.extend_from_slice(&[0; 4]);
            entries.extend_from_slice(&ENABLED.to_le_bytes());
            entries.extend_from_slice(&[0; 8]);
        }
    }
    srat.append_slice(&entries);
    srat
}

fn slit(nodes: usize) -> SLIT {
    let mut slit = SLIT::new(OEM, OEM_TABLE, OEM_REVISION, nodes as u32);
    for from in 0..nodes {
        for to in 0..from {
            slit.set_distance(from, to, REMOTE_DISTANCE);
        }
    }
    slit
}
