//! A vCPU that follows its memory, in simulated time: programs over two or three slices whose
//! pages are fetched one at a time, with what the policy costs and saves against a vCPU that
//! stays. Each run is repeated by its seed.

use std::collections::{HashSet, VecDeque};

use super::*;

/// What a fault takes.
const WAIT_NS: u64 = 100_000;
/// From a request to the vCPU's first instruction at the other slice.
const MOVE_NS: u64 = 500_000;
/// Pages that the kernel writes wherever the vCPU is: stack, tables, its processor's data.
const KERNEL_PAGES: u64 = 24;
/// The work on a page that is here.
const TOUCH_NS: u64 = 4_000;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Guest memory: each page has a slice as its home, and each slice keeps some pages of the
/// others' parts, the latest ones.
struct Memory {
    homes: Vec<usize>,
    spare: usize,
    kept: Vec<(VecDeque<u64>, HashSet<u64>)>,
}

impl Memory {
    /// The slice from which the page must be fetched, if it is not at `here`.
    fn touch(&mut self, page: u64, here: usize) -> Option<usize> {
        let home = self.homes[page as usize];
        let at = |(slice, kept): (usize, &(VecDeque<u64>, HashSet<u64>))| {
            kept.1.contains(&page).then_some(slice)
        };
        let holder = self.kept.iter().enumerate().find_map(at).unwrap_or(home);
        if holder == here {
            return None;
        }
        self.kept[holder].1.remove(&page);
        if home != here {
            let (order, kept) = &mut self.kept[here];
            order.push_back(page);
            kept.insert(page);
            while kept.len() > self.spare {
                let Some(oldest) = order.pop_front() else {
                    break;
                };
                kept.remove(&oldest);
            }
        }
        Some(holder)
    }
}

struct World {
    memory: Memory,
    /// None: it never asks.
    followers: Vec<Option<Follower>>,
    here: usize,
    now_ns: u64,
    busy_ns: u64,
    faults: u64,
    moves: u64,
    /// Where the move that was asked for ends, and when.
    moving: Option<(usize, u64)>,
    /// Pages of the program that one fault brings at most, if they are used in sequence.
    ahead: u64,
    /// The page behind the last ones that were fetched.
    next: u64,
}

impl World {
    /// The first pages are the kernel's; `homes` are those of the program's.
    fn new(follows: bool, slices: usize, homes: &[usize], spare: usize) -> Self {
        let kernel = vec![0; KERNEL_PAGES as usize];
        Self {
            memory: Memory {
                homes: [&kernel, homes].concat(),
                spare,
                kept: vec![Default::default(); slices],
            },
            followers: (0..slices)
                .map(|me| follows.then(|| Follower::new(None, me, slices)))
                .collect(),
            here: 0,
            now_ns: 0,
            busy_ns: 0,
            faults: 0,
            moves: 0,
            moving: None,
            ahead: 1,
            next: 0,
        }
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns)
    }

    /// The program uses one of its pages.
    fn touch(&mut self, page: u64) {
        self.touch_any(KERNEL_PAGES + page);
    }

    fn touch_any(&mut self, page: u64) {
        if let Some((to, _)) = self.moving.filter(|(_, at)| self.now_ns >= *at) {
            self.moving = None;
            self.move_to(to);
        }
        if let Some(from) = self.memory.touch(page, self.here) {
            let pages = 1 + self.fetch_ahead(page, from);
            self.fetch(Some(from), pages * 4096);
        }
        self.now_ns += TOUCH_NS;
        self.busy_ns += TOUCH_NS;
    }

    /// How many pages behind `page` come along from the same slice: as in a machine, pages
    /// of others that are read in sequence, and the kernel's code, 8 together.
    fn fetch_ahead(&mut self, page: u64, from: usize) -> u64 {
        let is_kernel = page < KERNEL_PAGES;
        let is_wanted = self.memory.homes[page as usize] == from && self.next == page;
        let many = match (is_kernel, is_wanted) {
            _ if self.ahead == 1 => 1,
            (true, _) => 8,
            (false, true) => self.ahead,
            (false, false) => 1,
        };
        let end = match is_kernel {
            true => KERNEL_PAGES,
            false => self.memory.homes.len() as u64,
        };
        let mut came = 0;
        for next in page + 1..(page + many).min(end) {
            if self.memory.homes[next as usize] != from && !is_kernel {
                break;
            }
            came += u64::from(self.memory.touch(next, self.here).is_some());
        }
        self.next = page + 1 + came;
        came
    }

    fn fetch(&mut self, from: Option<usize>, bytes: u64) {
        self.now_ns += WAIT_NS;
        self.faults += 1;
        let fault = OwnFault {
            from,
            bytes,
            busy_ns: std::mem::take(&mut self.busy_ns),
            waited_ns: WAIT_NS,
            now: self.now(),
        };
        let follower = self.followers[self.here].as_mut();
        if let Some(to) = follower.and_then(|follower| follower.fault(fault)) {
            assert!(self.moving.is_none(), "one request at a time");
            assert_ne!(to, self.here);
            self.moving = Some((to, self.now_ns + MOVE_NS));
        }
    }

    fn move_to(&mut self, to: usize) {
        let bytes = self.followers[self.here].as_mut().unwrap().leave(to);
        let now = self.now();
        let arrived = self.followers[to].as_mut().unwrap().arrive(&bytes, now);
        arrived.unwrap();
        self.here = to;
        self.moves += 1;
        self.busy_ns = 0;
        for page in 0..KERNEL_PAGES {
            self.touch_any(page);
        }
    }
}

/// A program's time with `auto` in parts of its time with `never`, and both worlds.
fn compared(
    slices: usize,
    homes: &[usize],
    spare: usize,
    program: impl Fn(&mut World),
) -> (f64, World, World) {
    let [auto, never] = [true, false].map(|follows| {
        let mut world = World::new(follows, slices, homes, spare);
        program(&mut world);
        world
    });
    assert_eq!(never.moves, 0);
    (auto.now_ns as f64 / never.now_ns as f64, auto, never)
}

const PAGES: u64 = 50_000;

/// A quarter of the program's pages is on the first slice, the rest on the second.
fn mostly_far() -> Vec<usize> {
    (0..PAGES)
        .map(|page| usize::from(page >= PAGES / 4))
        .collect()
}

#[test]
fn a_search_goes_where_the_memory_is() {
    let search = |world: &mut World| {
        for _ in 0..10 {
            (0..PAGES).for_each(|page| world.touch(page));
        }
    };
    let (ratio, auto, never) = compared(2, &mostly_far(), 4000, search);
    assert!(ratio < 0.1, "{ratio}");
    assert!(auto.faults * 50 < never.faults, "{} faults", auto.faults);
    // To and fro, once in each pass.
    assert!((19..=21).contains(&auto.moves), "{} moves", auto.moves);
}

/// With 32 pages a fault there are few faults, but as much reason to go.
#[test]
fn a_search_with_read_ahead_goes_where_the_memory_is() {
    let search = |world: &mut World| {
        world.ahead = 32;
        for _ in 0..20 {
            (0..PAGES).for_each(|page| world.touch(page));
        }
    };
    let (ratio, auto, never) = compared(2, &mostly_far(), 4000, search);
    assert!(ratio < 0.7, "{ratio}");
    assert!(auto.faults * 10 < never.faults, "{} faults", auto.faults);
    assert!(auto.moves < 60, "{} moves", auto.moves);
}

#[test]
fn random_accesses_end_where_most_pages_are() {
    let random = |world: &mut World| {
        let mut random = Random(0x5eed);
        (0..300_000).for_each(|_| world.touch(random.below(PAGES)));
    };
    let (ratio, auto, _) = compared(2, &mostly_far(), 4000, random);
    assert!(ratio < 0.6, "{ratio}");
    assert!(auto.moves < 60, "{} moves", auto.moves);
}

#[test]
fn without_a_better_place_it_costs_little() {
    let scattered: Vec<usize> = (0..PAGES).map(|page| page as usize % 2).collect();
    for seed in 1..20 {
        let random = |world: &mut World| {
            let mut random = Random(seed);
            (0..300_000).for_each(|_| world.touch(random.below(PAGES)));
        };
        let (ratio, auto, never) = compared(2, &scattered, 4000, random);
        assert!(ratio < 1.05, "seed {seed}: {ratio}");
        assert!(auto.moves * 200 < never.faults, "{} moves", auto.moves);
    }
}

#[test]
fn a_working_set_that_fits_is_fetched_once_and_nothing_moves_to_and_fro() {
    let far = vec![1; 3000];
    let rounds = |world: &mut World| {
        for _ in 0..200 {
            (0..3000).for_each(|page| world.touch(page));
        }
    };
    let (ratio, auto, _) = compared(2, &far, 4000, rounds);
    assert!(ratio < 1.05, "{ratio}");
    assert!(auto.moves <= 3, "{} moves", auto.moves);
}

/// Pages that a vCPU of the other slice writes all the time: wherever this vCPU is, the
/// page comes from the slice where the writer is.
#[test]
fn pages_that_another_vcpu_writes_cost_little() {
    let program = |world: &mut World| {
        for step in 0..200_000_u64 {
            world.touch(step % 100);
            if world.here == 0 && step % 3 == 0 {
                world.fetch(Some(1), 4096);
            } else if step % 3 == 0 {
                // The writer faults on the slice that the page left, and this vCPU again.
                world.fetch(None, 0);
            }
        }
    };
    let (ratio, auto, _) = compared(2, &vec![0; 100], 4000, program);
    assert!(ratio < 1.05, "{ratio}");
    assert!(auto.moves < 400, "{} moves", auto.moves);
}

#[test]
fn each_phase_finds_its_slice() {
    let thirds: Vec<usize> = (0..PAGES).map(|page| (page * 3 / PAGES) as usize).collect();
    let phases = |world: &mut World| {
        let mut random = Random(7);
        for phase in 0..9 {
            let start = (phase % 3) * PAGES / 3;
            (0..100_000).for_each(|_| world.touch(start + random.below(PAGES / 3)));
        }
    };
    let (ratio, auto, _) = compared(3, &thirds, 4000, phases);
    assert!(ratio < 0.25, "{ratio}");
    assert!((8..=20).contains(&auto.moves), "{} moves", auto.moves);
}

/// A kernel that is idle: a few faults now and then.
#[test]
fn an_idle_vcpu_stays() {
    let idle = |world: &mut World| {
        for _ in 0..10_000 {
            world.now_ns += 10_000_000;
            world.busy_ns += 5_000_000;
            world.fetch(Some(1), 4096);
        }
    };
    let (_, auto, _) = compared(2, &[1], 4000, idle);
    assert_eq!(auto.moves, 0);
}

/// Requests that a busy target refuses: the vCPU asks rarely, and works on.
#[test]
fn a_refused_vcpu_asks_rarely() {
    let mut world = World::new(true, 2, &vec![1; PAGES as usize], 4000);
    let mut requests = 0;
    for touch in 0..2_000_000 {
        world.touch(touch % PAGES);
        requests += u64::from(world.moving.take().is_some());
    }
    let seconds = world.now_ns / 1_000_000_000;
    assert!(seconds > 150, "{seconds} s");
    assert!((3..=10).contains(&requests), "{requests} in {seconds} s");
}
