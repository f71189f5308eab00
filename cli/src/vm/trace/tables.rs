//! The two tables of the analysis of GiantVM (2022, section 3), for any run: who
//! faulted how, and which pages most, with what lies there.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use weft_coherent_memory::{FaultKind, FaultPurpose, FaultRecord};

use super::Trace;
use crate::vm::symbols::Symbols;

const PAGE_BYTES: u64 = 4096;
/// Names that are shown for one page.
const NAMES: usize = 4;
/// Functions that are shown for one page.
const FUNCTIONS: usize = 2;
/// Where the upper half begins: the kernel's.
const KERNEL: u64 = 0xffff_8000_0000_0000;

/// How many of what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Kinds {
    pub reads: u64,
    /// To write, where the page was not there.
    pub writes: u64,
    /// To write, where it was there to be read.
    pub upgrades: u64,
}

impl Kinds {
    pub fn all(&self) -> u64 {
        self.reads + self.writes + self.upgrades
    }

    fn add(&mut self, kind: FaultKind) {
        match kind {
            FaultKind::Read => self.reads += 1,
            FaultKind::Write => self.writes += 1,
            FaultKind::Upgrade => self.upgrades += 1,
        }
    }
}

/// A row of table 1: a vCPU, or the devices of a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct VcpuRow {
    pub node: usize,
    /// None for its devices.
    pub vcpu: Option<u32>,
    /// Its faults.
    #[serde(flatten)]
    pub kinds: Kinds,
    /// Of them, by a program of the guest.
    pub user: u64,
    /// For a page table.
    pub tables: u64,
    /// For instructions.
    pub code: u64,
    /// Seconds that it waited.
    pub waited_s: f64,
}

/// A row of table 2: a page.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PageRow {
    /// Guest-physical page number.
    pub page: u64,
    /// Faults of all nodes.
    #[serde(flatten)]
    pub kinds: Kinds,
    /// Of all faults, 0 to 1.
    pub share: f64,
    /// What lies there: names with the share of the faults that met them where that
    /// is known.
    pub names: Vec<String>,
    /// What was executed.
    pub functions: Vec<String>,
}

/// Both tables.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Tables {
    /// Version of this layout.
    pub format: u32,
    /// The machine.
    pub name: String,
    /// Over how long.
    pub seconds: f64,
    pub faults: u64,
    /// Pages that they were on.
    pub pages: u64,
    /// Faults that came faster than they were read: only their page is known, or nothing.
    pub missed: u64,
    /// Table 1.
    pub by_vcpu: Vec<VcpuRow>,
    /// Table 2, the hottest first.
    pub by_page: Vec<PageRow>,
}

impl Tables {
    /// The tables of a trace, with this many pages.
    pub fn new(trace: &Trace, symbols: Option<&Symbols>, top: usize) -> Tables {
        let pages = counts(trace);
        let faults = pages.values().map(Kinds::all).sum::<u64>() + trace.more_faults();
        let mut hottest: Vec<(u64, Kinds)> =
            pages.iter().map(|(page, kinds)| (*page, *kinds)).collect();
        hottest.sort_by_key(|(page, kinds)| (std::cmp::Reverse(kinds.all()), *page));
        let namer = Namer {
            symbols,
            records: records_by_page(trace),
            areas: areas(trace),
        };
        let row = |(page, kinds): (u64, Kinds)| PageRow {
            page,
            kinds,
            share: kinds.all() as f64 / faults.max(1) as f64,
            names: namer.names(page),
            functions: namer.functions(page),
        };
        Tables {
            format: 1,
            name: trace.name.clone(),
            seconds: trace.seconds,
            faults,
            pages: pages.len() as u64 + trace.more_pages(),
            missed: trace.missed(),
            by_vcpu: by_vcpu(trace),
            by_page: hottest.into_iter().take(top).map(row).collect(),
        }
    }
}

/// By page, of all nodes: exact where the counts of the whole run are there.
fn counts(trace: &Trace) -> BTreeMap<u64, Kinds> {
    let mut pages = BTreeMap::<u64, Kinds>::new();
    for count in trace.pages.iter().flat_map(|slice| &slice.pages) {
        let kinds = pages.entry(count.page).or_default();
        kinds.reads += u64::from(count.reads);
        kinds.writes += u64::from(count.writes);
        kinds.upgrades += u64::from(count.upgrades);
    }
    if trace.pages.is_empty() {
        for fault in trace.records() {
            pages.entry(fault.page).or_default().add(fault.kind);
        }
    }
    pages
}

fn by_vcpu(trace: &Trace) -> Vec<VcpuRow> {
    let mut rows = BTreeMap::<(usize, Option<u32>), VcpuRow>::new();
    for slice in &trace.faults {
        for fault in &slice.faults {
            let row = rows.entry((slice.slice, fault.vcpu)).or_default();
            row.kinds.add(fault.kind);
            row.user += u64::from(fault.user);
            row.tables += u64::from(fault.purpose == FaultPurpose::Table);
            row.code += u64::from(fault.purpose == FaultPurpose::Code);
            row.waited_s += fault.waited_ns as f64 / 1e9;
        }
    }
    let named = |((node, vcpu), row)| VcpuRow { node, vcpu, ..row };
    rows.into_iter().map(named).collect()
}

fn records_by_page(trace: &Trace) -> HashMap<u64, Vec<&FaultRecord>> {
    let mut pages = HashMap::<u64, Vec<&FaultRecord>>::new();
    for fault in trace.records() {
        pages.entry(fault.page).or_default().push(fault);
    }
    pages
}

/// Where each vCPU's own area begins: the base of GS that it had most often.
fn areas(trace: &Trace) -> Vec<(u64, u32)> {
    let mut bases = BTreeMap::<u32, BTreeMap<u64, u64>>::new();
    for fault in trace.records() {
        if let (Some(vcpu), 1..) = (fault.vcpu, fault.gs_base) {
            *bases
                .entry(vcpu)
                .or_default()
                .entry(fault.gs_base)
                .or_default() += 1;
        }
    }
    let usual = |(vcpu, bases): (u32, BTreeMap<u64, u64>)| {
        let (base, _) = bases.into_iter().max_by_key(|(_, count)| *count)?;
        Some((base, vcpu))
    };
    bases.into_iter().filter_map(usual).collect()
}

/// Says what lies on a page.
struct Namer<'a> {
    symbols: Option<&'a Symbols>,
    records: HashMap<u64, Vec<&'a FaultRecord>>,
    areas: Vec<(u64, u32)>,
}

impl Namer<'_> {
    fn names(&self, page: u64) -> Vec<String> {
        let mut names = BTreeMap::<String, u64>::new();
        let records = self.records.get(&page).map_or(&[][..], Vec::as_slice);
        for record in records {
            *names.entry(self.name(page, record)).or_default() += 1;
        }
        let mut most: Vec<(String, u64)> = names.into_iter().collect();
        most.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let all = records.len();
        let mut shown: Vec<String> = most
            .iter()
            // Below one in a hundred it is no reason for anything.
            .take_while(|(_, count)| count * 100 >= all as u64)
            .take(NAMES)
            .map(|(name, count)| match *count as usize == all {
                true => name.clone(),
                false => format!("{name} {:.0} %", *count as f64 / all as f64 * 100.0),
            })
            .collect();
        if most.len() > shown.len() {
            shown.push(format!("{} more", most.len() - shown.len()));
        }
        if shown.is_empty() {
            shown = self.on_page(page);
        }
        shown
    }

    /// What lies on a page without a recorded fault.
    fn on_page(&self, page: u64) -> Vec<String> {
        let Some((symbols, start)) = self
            .symbols
            .and_then(|symbols| Some((symbols, symbols.in_image(page * PAGE_BYTES)?)))
        else {
            return Vec::new();
        };
        let names = symbols.within(start, PAGE_BYTES);
        let mut shown: Vec<String> = names
            .iter()
            .take(NAMES)
            .map(|name| (*name).to_owned())
            .collect();
        if names.len() > NAMES {
            shown.push(format!("{} more", names.len() - NAMES));
        }
        shown
    }

    fn name(&self, page: u64, record: &FaultRecord) -> String {
        match record.purpose {
            FaultPurpose::Device => return "(device)".into(),
            FaultPurpose::Table => return "(page table)".into(),
            _ => {}
        }
        if let Some(name) = self.in_kernel(page, record) {
            return name;
        }
        let what = match (record.purpose, record.user, record.address < KERNEL) {
            (FaultPurpose::Code, ..) => "code of a program",
            (_, true, _) => "memory of a program",
            // The kernel, on its way to a program's memory.
            (_, false, true) => "memory of a program, by the kernel",
            (_, false, false) => "memory of the kernel",
        };
        format!("({what})")
    }

    fn in_kernel(&self, page: u64, record: &FaultRecord) -> Option<String> {
        let symbols = self.symbols?;
        let offset = record.address % PAGE_BYTES;
        if let Some(address) = symbols.in_image(page * PAGE_BYTES + offset) {
            return symbols.at(address).map(|(name, _)| name.to_owned());
        }
        if record.address < KERNEL {
            return None;
        }
        self.areas.iter().find_map(|(base, vcpu)| {
            let name = symbols.of_cpu(record.address.wrapping_sub(*base))?;
            Some(format!("{name} of CPU {vcpu}"))
        })
    }

    fn functions(&self, page: u64) -> Vec<String> {
        let Some(symbols) = self.symbols else {
            return Vec::new();
        };
        let mut functions = BTreeMap::<&str, u64>::new();
        let records = self.records.get(&page).map_or(&[][..], Vec::as_slice);
        for record in records {
            if record.rip >= KERNEL
                && record.purpose != FaultPurpose::Code
                && let Some((name, _)) = symbols.at(record.rip)
            {
                *functions.entry(name).or_default() += 1;
            }
        }
        let mut most: Vec<(&str, u64)> = functions.into_iter().collect();
        most.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
        let names = most.into_iter().take(FUNCTIONS);
        names.map(|(name, _)| name.to_owned()).collect()
    }
}
