//! The tables as a kernel reads them, and as ACPICA's compiler does.

use std::collections::BTreeMap;
use std::ops::Range;
use std::process::Command;

use super::topology::{equal_shares, guest_physical};
use super::*;

const SIZE: u64 = 64 << 20;

fn description(cpus: u8, nodes: usize) -> Description {
    Description {
        nodes: equal_shares(SIZE, cpus, nodes),
        high_window: high_window(&Ram::new(SIZE).unwrap()),
        real_time_clock: false,
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// Follows the pointers from the RSDP, checking each table on the way.
fn read_tables(ram: &Ram, placed: &Placed) -> BTreeMap<String, Vec<u8>> {
    let read = |address: u64, length: u64| {
        assert!(placed.range.contains(&address));
        assert!(address + length <= placed.range.end);
        let mut bytes = vec![0; length as usize];
        ram.guest()
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    };
    let table = |address: u64| {
        assert_eq!(address % 16, 0);
        let bytes = read(address, number(&read(address + 4, 4)));
        assert_eq!(sum(&bytes), 0, "{:?}", &bytes[..4]);
        bytes
    };
    let rsdp = read(placed.rsdp, 36);
    assert_eq!(&rsdp[..8], b"RSD PTR ");
    assert_eq!(sum(&rsdp[..20]), 0);
    assert_eq!(sum(&rsdp), 0);
    let xsdt = table(number(&rsdp[24..32]));
    let mut tables: BTreeMap<String, Vec<u8>> = xsdt[36..]
        .chunks(8)
        .map(|pointer| table(number(pointer)))
        .map(|bytes| (String::from_utf8_lossy(&bytes[..4]).into_owned(), bytes))
        .collect();
    let dsdt = table(number(&tables["FACP"][140..148]));
    tables.insert("DSDT".into(), dsdt);
    let mut facs = vec![0; 64];
    let address = number(&tables["FACP"][36..40]);
    assert_eq!(address % 64, 0);
    assert!(address >= placed.range.end, "it is not to be reclaimed");
    ram.guest()
        .read_slice(&mut facs, GuestAddress(address))
        .unwrap();
    tables.insert("FACS".into(), facs);
    tables
}

fn placed_tables(description: &Description) -> BTreeMap<String, Vec<u8>> {
    let ram = Ram::new(SIZE).unwrap();
    let placed = place(&ram, description).unwrap();
    read_tables(&ram, &placed)
}

#[test]
fn every_table_is_reached_and_whole() {
    let tables = placed_tables(&description(2, 1));
    let names: Vec<&str> = tables.keys().map(String::as_str).collect();
    assert_eq!(names, ["APIC", "DSDT", "FACP", "FACS", "MCFG", "SRAT"]);
    assert!(placed_tables(&description(2, 2)).contains_key("SLIT"));
}

#[test]
fn the_fixed_description_is_hardware_reduced_and_has_its_registers() {
    let fadt = &placed_tables(&description(1, 1))["FACP"];
    assert_eq!(fadt.len(), 276);
    let flags = number(&fadt[112..116]);
    assert_ne!(flags & 1 << 20, 0, "hardware-reduced");
    assert_ne!(flags & 1 << 10, 0, "has a reset register");
    // Space 1 is I/O; the address is the second half.
    for (offset, port) in [(116, 0x602), (244, 0x600), (256, 0x601)] {
        assert_eq!(fadt[offset..offset + 4], [1, 8, 0, 1]);
        assert_eq!(number(&fadt[offset + 4..offset + 12]), port);
    }
    assert_eq!(fadt[128], 1, "what is written to reset");
}

#[test]
fn the_firmwares_own_structure_is_whole() {
    let ram = Ram::new(SIZE).unwrap();
    let placed = place(&ram, &description(1, 1)).unwrap();
    let tables = read_tables(&ram, &placed);
    let facs = &tables["FACS"];
    assert_eq!(&facs[..4], b"FACS");
    assert_eq!(number(&facs[4..8]), 64);
    assert_eq!(facs[8..32], [0; 24], "no waking vector, no lock, no flags");
    let address = number(&tables["FACP"][36..40]);
    assert_eq!(number(&tables["FACP"][132..140]), 0, "one address");
    assert_eq!(address, FACS);
}

#[test]
fn every_cpu_is_told_with_its_node() {
    for (cpus, nodes) in [(1, 1), (4, 2), (5, 3), (255, 64)] {
        let tables = placed_tables(&description(cpus, nodes));
        let madt = &tables["APIC"];
        let mut local = Vec::new();
        let mut rest = &madt[44..];
        while let [kind, length, ..] = *rest {
            if kind == 0 {
                assert_eq!(rest[2], rest[3]);
                local.push(rest[3]);
            }
            rest = &rest[usize::from(length)..];
        }
        assert_eq!(local, (0..cpus).collect::<Vec<u8>>());

        let mut in_nodes = Vec::new();
        let mut memory = 0;
        let mut rest = &tables["SRAT"][48..];
        while let [kind, length, ..] = *rest {
            match kind {
                0 => in_nodes.push(rest[3]),
                _ => memory += number(&rest[16..24]),
            }
            rest = &rest[usize::from(length)..];
        }
        in_nodes.sort_unstable();
        assert_eq!(in_nodes, local);
        assert_eq!(memory, SIZE);
        if let Some(slit) = tables.get("SLIT") {
            assert_eq!(slit.len(), 44 + nodes * nodes);
            for (index, distance) in slit[44..].iter().enumerate() {
                let own = index / nodes == index % nodes;
                assert_eq!(*distance, if own { 10 } else { 40 });
            }
        }
    }
}

#[test]
fn every_slice_is_a_node_whatever_it_gives() {
    const MIB: u64 = 1 << 20;
    for shares in [
        vec![(0..1, 0..64), (1..2, 64..128)],
        vec![(0..2, 0..64), (2..2, 64..96), (2..3, 96..96)],
    ] {
        let nodes = shares.len();
        let node = |(cpus, mib): &(Range<u8>, Range<u64>)| Node {
            cpus: cpus.clone().collect(),
            memory: guest_physical(mib.start * MIB..mib.end * MIB),
        };
        let tables = placed_tables(&Description {
            nodes: shares.iter().map(node).collect(),
            ..description(1, 1)
        });
        let mut found = vec![(0, 0); nodes];
        let mut rest = &tables["SRAT"][48..];
        while let [kind, length, ..] = *rest {
            match kind {
                0 => found[usize::from(rest[2])].0 += 1,
                _ => found[number(&rest[2..6]) as usize].1 += number(&rest[16..24]),
            }
            rest = &rest[usize::from(length)..];
        }
        let given = shares.iter();
        assert!(
            given
                .map(|(cpus, mib)| (cpus.len(), (mib.end - mib.start) * MIB))
                .eq(found)
        );
        assert_eq!(tables["SLIT"].len(), 44 + nodes * nodes);
    }
}

#[test]
fn the_window_for_64_bit_bars_is_above_all_memory() {
    let ram = Ram::new(SIZE).unwrap();
    assert_eq!(high_window(&ram), 4 << 30..20 << 30);
}

#[test]
fn what_has_no_room_is_refused() {
    let ram = Ram::new(SIZE).unwrap();
    let mut nodes = equal_shares(SIZE, 1, 1);
    nodes[0].memory = (0..4000)
        .map(|page| page * 4096..(page + 1) * 4096)
        .collect();
    let description = Description {
        nodes,
        ..description(1, 1)
    };
    assert!(matches!(place(&ram, &description), Err(AcpiError::Room(_))));
}

/// Disassembles every table, and compiles the DSDT again, with every warning an error.
#[test]
fn iasl_understands_every_table() {
    if Command::new("iasl").arg("-v").output().is_err() {
        weft_test_support::skipped(&"no iasl (Debian package acpica-tools)");
        return;
    }
    let folder = std::env::temp_dir().join(format!("weft-acpi-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let run = |arguments: &[&str]| {
        let output = Command::new("iasl")
            .args(arguments)
            .current_dir(&folder)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(output.status.success(), "{arguments:?}: {text}");
        text
    };
    let with_clock = Description {
        real_time_clock: true,
        ..description(3, 2)
    };
    for (name, bytes) in placed_tables(&with_clock) {
        let file = format!("{name}.dat");
        std::fs::write(folder.join(&file), bytes).unwrap();
        let text = run(&["-d", &file]);
        assert!(!text.contains("rror"), "{text}");
        let source = std::fs::read_to_string(folder.join(format!("{name}.dsl"))).unwrap();
        assert!(!source.contains("**** "), "{source}");
    }
    let text = run(&["-we", "-ts", "DSDT.dsl"]);
    assert!(text.contains("0 Errors, 0 Warnings"), "{text}");
    std::fs::remove_dir_all(&folder).unwrap();
}
