//! Pages of a checkpoint that another process reads and sends, or that come from files, while
//! users of two slices use them.

use super::*;
use std::sync::{Condvar, PoisonError};
use std::thread::sleep;

const PAGES: u64 = 400;
/// Pages that come together.
const RUN: u64 = 16;

fn bytes_of(run: u64) -> Vec<u8> {
    let page = |page: u64| [page as u8 & 0x7f | 1; PAGE as usize];
    let first = run * RUN;
    (first..first + RUN).flat_map(page).collect()
}

fn is_here(page: u64) -> bool {
    (page / RUN).is_multiple_of(3)
}

fn runs(here: bool) -> impl Iterator<Item = u64> {
    (0..PAGES / RUN).filter(move |run| is_here(run * RUN) == here)
}

/// Every third run.
struct Files;

impl PageFiles for Files {
    fn read(&self, page: u64, take: &mut dyn FnMut(u64, &[u8])) -> Result<(), String> {
        assert!(is_here(page), "page {page:#x}");
        take(page / RUN * RUN, &bytes_of(page / RUN));
        Ok(())
    }
}

impl AbsentPages for Files {
    fn read_all(&self, take: &mut dyn FnMut(u64, &[u8]) -> bool) -> Result<(), String> {
        runs(true).all(|run| take(run * RUN, &bytes_of(run)));
        Ok(())
    }
}

/// Sends the other runs in the order in which they are asked for, each page twice or thrice: late, in two
/// messages, and again when users have changed it.
#[derive(Default)]
struct LateSender {
    asked: Mutex<Vec<u64>>,
    came: Condvar,
    all: AtomicU64,
}

impl ElsewherePages for LateSender {
    fn has(&self, page: u64) -> bool {
        !is_here(page)
    }

    fn ask(&self, page: u64) -> Result<(), String> {
        assert_unlocked("a page is asked for");
        self.asked.lock().unwrap().push(page / RUN);
        Ok(())
    }

    fn ask_all(&self) {
        self.asked.lock().unwrap().extend(runs(false));
    }

    fn wait_for_all(&self) {
        let asked = self.asked.lock().unwrap();
        let until = Duration::from_secs(20);
        let waited = (self.came).wait_timeout_while(asked, until, |asked| !asked.is_empty());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn all_came(&self) {
        self.all.fetch_add(1, Ordering::SeqCst);
    }
}

impl LateSender {
    fn run(&self, memory: &SharedMemory) {
        while self.all.load(Ordering::SeqCst) == 0 && !memory.is_over() {
            let next = self.asked.lock().unwrap().first().copied();
            let Some(run) = next else {
                sleep(Duration::from_micros(100));
                continue;
            };
            sleep(Duration::from_micros(run * 37 % 400));
            let first = run * RUN;
            let bytes = bytes_of(run);
            let (one, other) = bytes.split_at((RUN / 2 * PAGE) as usize);
            memory.receive_absent(first + RUN / 2, other);
            memory.receive_absent(first, one);
            memory.receive_absent(first, &bytes);
            let mut asked = self.asked.lock().unwrap();
            asked.remove(0);
            if memory.awaits_absent(first..first + RUN) {
                asked.insert(0, run);
            }
            self.came.notify_all();
        }
    }
}

/// Increments each page's first word once; finds the bytes of the file behind it.
fn increment(user: &mut User, number: u64) {
    for step in 0..PAGES {
        let page = (step * 7 + number * 131) % PAGES;
        let word = user.word(page * PAGE + 8 * number, Access::Write);
        let before = u64::from_le_bytes([page as u8 & 0x7f | 1; 8]);
        assert_eq!(
            word.fetch_add(1, Ordering::SeqCst),
            before,
            "page {page:#x}"
        );
        let last = user.word(page * PAGE + PAGE - 8, Access::Read);
        assert_eq!(last.load(Ordering::SeqCst), before, "page {page:#x}");
    }
}

#[test]
fn pages_that_another_process_reads_come_once_for_all_users() {
    for round in 0..20 {
        let rig = Rig::new(2, ManagerOf::Fixed(NodeId(1)));
        let memory = &rig.memories[1];
        let pages = Arc::new(LateSender::default());
        let pages_of = |here| runs(here).map(|run| run * RUN..(run + 1) * RUN);
        let source = Source::Elsewhere(pages.clone());
        memory.adopt_absent(pages_of(false), source).unwrap();
        let source = Source::Here(Arc::new(Files));
        memory.adopt_absent(pages_of(true), source).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| pages.run(memory));
            scope.spawn(|| {
                sleep(Duration::from_millis(round % 4 * 5));
                memory.load_all();
            });
            rig.all_at_once(2, |number, user| increment(user, number));
        });
        assert_eq!(memory.absent(), 0);
        assert_eq!(pages.all.load(Ordering::SeqCst), 1);
        let mut user = rig.user(0);
        user.inside();
        for page in 0..PAGES {
            let before = u64::from_le_bytes([page as u8 & 0x7f | 1; 8]);
            for number in 0..4 {
                let word = user.word(page * PAGE + 8 * number, Access::Read);
                assert_eq!(word.load(Ordering::SeqCst), before + 1, "page {page:#x}");
            }
        }
        drop(user);
        rig.end();
    }
}

#[test]
fn a_page_that_is_in_no_file_is_a_failure() {
    struct Nothing;
    impl ElsewherePages for Nothing {
        fn has(&self, _: u64) -> bool {
            true
        }
        fn ask(&self, page: u64) -> Result<(), String> {
            Err(format!("page {page:#x} is in no file"))
        }
        fn ask_all(&self) {}
        fn wait_for_all(&self) {}
        fn all_came(&self) {}
    }
    let rig = Rig::new(1, ManagerOf::Fixed(NodeId(0)));
    let memory = &rig.memories[0];
    let source = Source::Elsewhere(Arc::new(Nothing));
    memory.adopt_absent(std::iter::once(3..4), source).unwrap();
    memory.load_all();
    let until = Instant::now() + Duration::from_secs(20);
    let failures = || rig.failures.lock().unwrap().clone();
    while failures().is_empty() && Instant::now() < until {
        sleep(Duration::from_millis(1));
    }
    assert_eq!(failures(), ["page 0x3 is in no file"]);
}
