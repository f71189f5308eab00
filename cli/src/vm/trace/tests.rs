//! Tables of made-up traces.

use std::path::PathBuf;

use weft_coherent_memory::{
    FaultKind, FaultPurpose, FaultRecord, PageCount, SliceFaults, SlicePages,
};

use super::*;
use crate::vm::symbols::tests::MAP;

const IMAGE: u64 = 0xffff_ffff_8100_0000;
const AREA: u64 = 0xffff_8880_0741_0000;

fn fault(vcpu: u32, page: u64, address: u64) -> FaultRecord {
    FaultRecord {
        time_ns: 1,
        waited_ns: 500_000_000,
        page,
        kind: FaultKind::Upgrade,
        purpose: FaultPurpose::Data,
        vcpu: Some(vcpu),
        user: false,
        address,
        rip: IMAGE + 0x48,
        gs_base: AREA,
    }
}

fn trace(faults: Vec<FaultRecord>) -> Trace {
    let next = faults.len() as u64;
    Trace {
        format: FORMAT,
        name: "t".into(),
        kernel: PathBuf::from("/nowhere/vmlinux"),
        seconds: 2.0,
        pages: Vec::new(),
        faults: vec![SliceFaults {
            slice: 0,
            next,
            missed: 0,
            faults,
        }],
    }
}

fn symbols() -> Symbols {
    let path = std::env::temp_dir().join(format!(
        "weft-trace-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    std::fs::write(&path, MAP).unwrap();
    let symbols = Symbols::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    symbols
}

#[test]
fn pages_are_named_by_what_was_met_there() {
    let jiffies = fault(0, 0x1001, IMAGE + 0x1980);
    let faults = vec![
        jiffies,
        // The same page through the direct map.
        fault(0, 0x1001, 0xffff_8880_0100_1984),
        fault(0, 0x1001, IMAGE + 0x1a08),
        fault(0, 0x7411, AREA + 0x1208),
        FaultRecord {
            purpose: FaultPurpose::Table,
            ..fault(0, 0x30, 0x40_0000)
        },
        FaultRecord {
            user: true,
            gs_base: 0,
            rip: 0x40_1000,
            ..fault(0, 0x31, 0x40_0000)
        },
        fault(0, 0x32, 0xffff_8880_0003_2000),
    ];
    let tables = Tables::new(&trace(faults), Some(&symbols()), 5);
    assert_eq!((tables.faults, tables.pages), (7, 5));
    let names: Vec<String> = tables
        .by_page
        .iter()
        .map(|row| row.names.join(", "))
        .collect();
    assert_eq!(
        names,
        [
            "jiffies 67 %, jiffies_lock 33 %",
            "(page table)",
            "(memory of a program)",
            "(memory of the kernel)",
            "runqueues of CPU 0",
        ]
    );
    assert_eq!(tables.by_page[0].functions, ["__schedule"]);
    assert!(tables.by_page[2].functions.is_empty());
    let row = &tables.by_vcpu[0];
    assert_eq!((row.kinds.upgrades, row.user, row.tables), (7, 1, 1));
    assert_eq!(row.waited_s, 3.5);
}

#[test]
fn counts_of_the_whole_run_go_before_the_faults_that_are_remembered() {
    let mut trace = trace(vec![fault(1, 0x1001, IMAGE + 0x1980)]);
    let count = |page, reads| PageCount {
        page,
        reads,
        writes: 0,
        upgrades: 0,
    };
    for slice in 0..2 {
        trace.pages.push(SlicePages {
            slice,
            pages: vec![count(0x1000, 10), count(0x1001, 4)],
            more_pages: 1,
            more_faults: 6,
        });
    }
    let tables = Tables::new(&trace, Some(&symbols()), 1);
    assert_eq!((tables.faults, tables.pages), (40, 4));
    let row = &tables.by_page[0];
    assert_eq!((row.page, row.kinds.reads, row.share), (0x1000, 20, 0.5));
    // No fault there is remembered: what lies there is all that is known.
    assert_eq!(row.names, ["_text", "__schedule"]);
}

#[test]
fn without_names_there_are_still_tables() {
    let tables = Tables::new(&trace(vec![fault(0, 1, 2)]), None, 20);
    let text = render::render(&tables);
    assert!(
        text.starts_with("vm t: 1 faults on 1 pages in 2.0 s"),
        "{text}"
    );
    assert!(
        text.contains("memory of a program, by the kernel"),
        "{text}"
    );
    let nothing = render::render(&Tables::new(&trace(Vec::new()), None, 20));
    assert!(!nothing.contains("Table 1"), "{nothing}");
}

#[test]
fn what_is_read_is_joined_and_asked_for_from_there_on() {
    let mut trace = trace(vec![fault(0, 1, 2)]);
    assert_eq!(trace.next(2, u64::MAX), [1, u64::MAX]);
    let more = |slice, next, missed| SliceFaults {
        slice,
        next,
        missed,
        faults: vec![fault(0, 3, 4)],
    };
    assert!(trace.append(vec![more(0, 5, 3), more(1, 1, 0)]));
    assert_eq!((trace.next(2, 0), trace.missed()), (vec![5, 1], 3));
    assert_eq!(trace.records().count(), 3);
    assert!(!trace.append(Vec::new()));
}

#[test]
fn a_file_comes_out_as_it_went_in() {
    let path = std::env::temp_dir().join(format!("weft-trace-file-{}", std::process::id()));
    let trace = trace(vec![fault(0, 1, u64::MAX)]);
    write(&trace, File::create(&path).unwrap(), &path, "t").unwrap();
    assert_eq!(read(&path).unwrap(), trace);
    std::fs::write(&path, "{}").unwrap();
    let error = format!("{:#}", read(&path).unwrap_err());
    assert!(error.contains("cannot read the trace"), "{error}");
    std::fs::remove_file(&path).unwrap();
}
