//! Queues of a disk move while vCPUs use them. Each vCPU writes a sector, reads it, and goes on
//! when the interrupt of its queue comes. So a request, a kick or an interrupt that is lost
//! stops it, and a request that ends twice, or with other bytes, is seen.

use std::collections::BTreeMap;

use weft_aggregate::devices::DataPath;
use weft_guest_memory::ECAM;

use super::*;
use crate::move_report::QueueMove;

/// Vectors of the queues: this and the next one.
pub(super) const FIRST: u8 = 0x61;
/// Where the rings of queue 0 are; those of the next queue follow.
const RINGS: u64 = 0x10_0000;
const SPACE: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADER: u64 = 0x4000;
const DATA: u64 = 0x5000;
const STATUS: u64 = 0x6000;
const ENTRIES: u16 = 8;
const SECTOR: usize = 512;
const SECTORS: u64 = 64;
/// Times that queues move in a test.
const MOVES: usize = 60;

/// What the guest knows of its queues.
#[derive(Default)]
pub(super) struct Queues {
    /// Where each is notified.
    doorbells: Mutex<Vec<u64>>,
    /// Requests of each vCPU that ended.
    pub done: [AtomicU64; 2],
}

/// The registers of the disk, which is the first PCI device.
struct Registers<'a>(&'a mut dyn Environment);

impl Registers<'_> {
    fn read(&mut self, address: u64, length: usize) -> u64 {
        let mut data = [0; 8];
        self.0.mmio_read(address, &mut data[..length]);
        u64::from_le_bytes(data)
    }

    fn write(&mut self, address: u64, value: u64, length: usize) {
        self.0.mmio_write(address, &value.to_le_bytes()[..length]);
    }

    fn configuration(&mut self, register: u64) -> u64 {
        self.read(ECAM + (1 << 15) + register, 4)
    }

    fn bar(&mut self, index: u64) -> u64 {
        let low = self.configuration(0x10 + 4 * index);
        let high = match low & 4 {
            0 => 0,
            _ => self.configuration(0x14 + 4 * index),
        };
        low & !0xf | high << 32
    }

    /// The common structure, the notifications and their distance, and the MSI-X capability.
    fn find(&mut self) -> [u64; 4] {
        let mut found = [0; 4];
        let mut at = self.configuration(0x34) & 0xff;
        while at != 0 {
            let first = self.configuration(at);
            let place = |bar: u64, offset| bar + offset;
            match (first & 0xff, first >> 24) {
                (9, kind @ (1 | 2)) => {
                    let bar = self.configuration(at + 4) & 0xff;
                    let offset = self.configuration(at + 8);
                    found[kind as usize - 1] = place(self.bar(bar), offset);
                    if kind == 2 {
                        found[2] = self.configuration(at + 16);
                    }
                }
                (0x11, _) => found[3] = at,
                _ => {}
            }
            at = first >> 8 & 0xff;
        }
        found
    }

    /// Vector `vector` of the device goes to a vCPU as interrupt `number`.
    fn route(&mut self, table: u64, vector: u64, (vcpu, number): (u64, u8)) {
        let entry = table + 16 * vector;
        self.write(entry, LOCAL_APIC & !0xf_ffff | 0xe0_0000 | vcpu << 12, 4);
        self.write(entry + 4, 0, 4);
        self.write(entry + 8, number.into(), 4);
        self.write(entry + 12, 0, 4);
    }
}

/// vCPU 0 starts the disk, with a queue for each vCPU.
pub(super) fn begin(judge: &Judge, environment: &mut dyn Environment) {
    let mut disk = Registers(environment);
    let [common, notify, distance, msix] = disk.find();
    let table = disk.configuration(msix + 4);
    let table = disk.bar(table & 7) + (table & !7);
    for queue in 0..2 {
        disk.route(table, queue + 1, (queue, FIRST + queue as u8));
    }
    disk.write(ECAM + (1 << 15) + msix + 2, 0x8000, 2);
    // VERSION_1 only.
    for (select, half) in [(0, 0), (1, 1)] {
        disk.write(common + 8, select, 4);
        disk.write(common + 12, half, 4);
    }
    disk.write(common + 0x14, 1 | 2 | 8, 1);
    for queue in 0..2 {
        let base = RINGS + queue * SPACE;
        disk.write(common + 0x16, queue, 2);
        disk.write(common + 0x18, ENTRIES.into(), 2);
        disk.write(common + 0x1a, queue + 1, 2);
        for (offset, place) in [(0x20, base), (0x28, base + AVAILABLE), (0x30, base + USED)] {
            disk.write(common + offset, place, 4);
            disk.write(common + offset + 4, 0, 4);
        }
        disk.write(common + 0x1c, 1, 2);
        let place = notify + disk.read(common + 0x1e, 2) * distance;
        judge.queues.doorbells.lock().unwrap().push(place);
    }
    disk.write(common + 0x14, 1 | 2 | 8 | 4, 1);
}

/// The content of the sector of a request.
fn byte(vcpu: u32, number: u64) -> u8 {
    (number / 2 % 251) as u8 ^ vcpu as u8
}

/// A vCPU offers request `number`: a write, or a read of what the last one wrote.
pub(super) fn ask(player: &Player, environment: &mut dyn Environment, number: u64) {
    let vcpu = player.id;
    let base = RINGS + u64::from(vcpu) * SPACE;
    let put = |offset: u64, bytes: &[u8]| assert!(player.memory.write(base + offset, bytes));
    let is_read = number % 2 == 1;
    let mut header = [0; 16];
    header[0] = u8::from(!is_read);
    let sector = u64::from(vcpu) * SECTORS + number / 2 % SECTORS;
    header[8..].copy_from_slice(&sector.to_le_bytes());
    put(HEADER, &header);
    let content = if is_read { 0xff } else { byte(vcpu, number) };
    put(DATA, &[content; SECTOR]);
    put(STATUS, &[0xee]);
    let pieces = [
        (HEADER, 16, 1),
        (DATA, SECTOR, 1 | (2 * u16::from(is_read))),
        (STATUS, 1, 2),
    ];
    for (index, (offset, length, flags)) in (0_u16..).zip(pieces) {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&(base + offset).to_le_bytes());
        descriptor[8..12].copy_from_slice(&(length as u32).to_le_bytes());
        descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
        descriptor[14..].copy_from_slice(&(index + 1).to_le_bytes());
        put(16 * u64::from(index), &descriptor);
    }
    let entry = number % u64::from(ENTRIES);
    put(AVAILABLE + 4 + 2 * entry, &[0, 0]);
    put(AVAILABLE + 2, &(number as u16 + 1).to_le_bytes());
    let doorbell = player.judge.queues.doorbells.lock().unwrap()[vcpu as usize];
    environment.mmio_write(doorbell, &(vcpu as u16).to_le_bytes());
}

/// The interrupt of a vCPU's queue came.
pub(super) fn take(player: &Player, environment: &mut dyn Environment) {
    let (vcpu, judge) = (player.id, &player.judge);
    let base = RINGS + u64::from(vcpu) * SPACE;
    let get = |offset: u64, bytes: &mut [u8]| assert!(player.memory.read(base + offset, bytes));
    let done = &judge.queues.done[vcpu as usize];
    let number = done.load(Ordering::SeqCst);
    let mut used = [0; 2];
    get(USED + 2, &mut used);
    let used = u16::from_le_bytes(used);
    // A device may interrupt once more when it goes on after a pause.
    if used == number as u16 {
        return;
    }
    let (mut status, mut data) = ([0], [0; SECTOR]);
    get(STATUS, &mut status);
    get(DATA, &mut data);
    if used != number as u16 + 1 || status != [0] || data != [byte(vcpu, number); SECTOR] {
        let what = (used, status[0], data[0], byte(vcpu, number));
        judge.fault(format!("request {number} of vCPU {vcpu}: {what:?}"));
    }
    done.fetch_add(1, Ordering::SeqCst);
    ask(player, environment, number + 1);
}

impl Slices {
    fn with_queues(cpus: &[u32], owner: u32, late: Option<usize>) -> (Self, std::path::PathBuf) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-queues-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, vec![0; 2 * SECTORS as usize * SECTOR]).unwrap();
        let judge = Judge {
            disk: Some(Disk {
                path: path.clone(),
                read_only: false,
                direct: false,
                slice: owner,
                data_path: DataPath::Bypass,
            }),
            uses_disk: true,
            ..Judge::default()
        };
        (Self::with(cpus, judge, late, &[]), path)
    }

    /// Both vCPUs have more requests done, and nothing was wrong.
    fn check_disk(&self) {
        let done = || [0, 1].map(|vcpu: usize| self.judge.queues.done[vcpu].load(Ordering::SeqCst));
        let before = done();
        devices::wait("requests", || {
            done()
                .iter()
                .zip(before)
                .all(|(now, before)| *now >= before + 3)
        });
        self.check();
    }
}

#[test]
fn queues_move_while_the_guest_uses_them() {
    for (cpus, owner, late) in [
        (&[1, 1][..], 0, None),
        (&[1, 1, 0], 2, None),
        (&[0, 1, 1], 0, Some(1)),
    ] {
        let (slices, path) = Slices::with_queues(cpus, owner, late);
        let handle = slices.machines[0].handle();
        let first = || -> BTreeMap<u8, Vec<usize>> {
            let places = cpus.iter().enumerate();
            let of = places.flat_map(|(slice, cpus)| vec![slice; *cpus as usize]);
            [(0, of.collect())].into()
        };
        for round in 0..MOVES {
            let leaves = 1 + round % (cpus.len() - 1);
            let before = first();
            let wanted = match round % 4 {
                0 | 2 => QueueMove::Away(leaves),
                _ => QueueMove::To(first()),
            };
            let is_paused = round % 3 == 2;
            if is_paused {
                super::ask(&slices.machines[0], MachineRequest::Pause);
            }
            let report = handle.move_queues(wanted).unwrap();
            if round == 0 {
                assert_eq!(report.before, before);
            }
            assert!(report.stopped_ns == 0 || !is_paused);
            if is_paused {
                assert_eq!(status(&slices.machines[0]).stage, Stage::Paused);
                super::ask(&slices.machines[0], MachineRequest::Resume);
            }
            if round % 3 == 0 {
                slices.check_disk();
            }
            if round % 10 == 0 {
                let vcpu = round / 10 % 2;
                let at = slices.locations()[vcpu];
                slices
                    .move_vcpu(vcpu as u32, (at + 1) % cpus.len())
                    .unwrap();
                slices.check_disk();
            }
        }
        slices.check_disk();
        // What cannot be is refused, and changes nothing.
        let wrong = [(0, vec![0, 0, 0])].into();
        let refused = handle.move_queues(QueueMove::To(wrong)).unwrap_err();
        assert!(matches!(refused, Refusal::Impossible { .. }), "{refused}");
        slices.check_disk();
        drop(slices);
        std::fs::remove_file(path).unwrap();
    }
}
