//! What the vCPUs of one slice share: which pages hold decoded code, and the
//! ways to make all of them give something up.
//!
//! # Code and writes
//!
//! A page's state rises through `NONE -> MARKING -> CODE` before anybody decodes
//! from it, and falls to `NONE` with every write by a vCPU that does not hold it in its TLB.
//!
//! - Nobody puts a write tag on a page that is not `NONE`.
//! - A page becomes `CODE` only after every other vCPU answered a demand to drop
//!   its write tag; only then are bytes decoded. So no write to a decoded page
//!   goes unnoticed.
//! - A write to a page that is not `NONE` first makes it `NONE` and posts the
//!   death of its blocks to every vCPU, then stores. A vCPU that decodes the
//!   page again in between waits for the writer's next block boundary, after
//!   the store.
//! - Every fall changes the version in the word's upper bits, so that nobody
//!   finishes marking what fell meanwhile.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use weft_vcpu::{Access, Memory, NotAnswered, PAGE_SIZE};

use crate::recent::{PageRecorder, RecentPages};
use crate::requests::{Demand, VcpuRequests, request};
use crate::zeroed::zeroed_words;

const NONE: u32 = 0;
const MARKING: u32 = 1;
const CODE: u32 = 2;
const STATE: u32 = 3;
const VERSION: u32 = 4;

/// The shared part of a slice's vCPUs.
pub struct SoftMachine {
    memory: Arc<dyn Memory>,
    /// By page number.
    code: Box<[AtomicU32]>,
    /// Guards the list; cloned before it is walked.
    vcpus: RwLock<Vec<Arc<VcpuRequests>>>,
    /// The pages that each of them used last.
    recent: RwLock<Vec<Arc<RecentPages>>>,
    /// Held by the one vCPU that needs all others outside, which must not wait
    /// for anything but them. Taken only by threads that are outside.
    exclusive: Mutex<()>,
}

impl SoftMachine {
    /// A slice without vCPUs over `memory`.
    pub fn new(memory: Arc<dyn Memory>) -> Arc<Self> {
        let pages = memory.end().div_ceil(PAGE_SIZE) as usize;
        Arc::new(Self {
            memory,
            code: zeroed_words(pages),
            vcpus: RwLock::default(),
            recent: RwLock::default(),
            exclusive: Mutex::new(()),
        })
    }

    /// Guest memory.
    pub fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// Takes in a new vCPU; its requests.
    pub fn join(&self) -> Arc<VcpuRequests> {
        let requests = Arc::new(VcpuRequests::default());
        self.vcpus
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(requests.clone());
        requests
    }

    /// Where a new vCPU records the pages that it uses.
    pub(crate) fn record(&self) -> PageRecorder {
        let pages = Arc::<RecentPages>::default();
        self.recent
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(pages.clone());
        PageRecorder::new(pages)
    }

    /// The records of the other vCPUs.
    pub(crate) fn recent_of_others(&self, own: &PageRecorder) -> Vec<Arc<RecentPages>> {
        let recent = self.recent.read().unwrap_or_else(PoisonError::into_inner);
        let others = recent.iter().filter(|other| !own.is_of(other));
        others.cloned().collect()
    }

    /// The vCPU of a record is gone.
    pub(crate) fn forget(&self, own: &PageRecorder) {
        let mut recent = self.recent.write().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|other| !own.is_of(other));
    }

    /// The vCPU is gone.
    pub fn leave(&self, requests: &Arc<VcpuRequests>) {
        self.vcpus
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|other| !Arc::ptr_eq(other, requests));
    }

    fn others(&self, own: Option<&Arc<VcpuRequests>>) -> Vec<Arc<VcpuRequests>> {
        self.vcpus
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .filter(|requests| own.is_none_or(|own| !Arc::ptr_eq(own, requests)))
            .cloned()
            .collect()
    }

    /// Posts `demand` to all vCPUs but `own` and waits until all answered.
    pub fn demand(
        &self,
        demand: Demand,
        own: Option<&Arc<VcpuRequests>>,
        patience: Duration,
    ) -> Result<(), NotAnswered> {
        let posted: Vec<_> = self
            .others(own)
            .into_iter()
            .map(|requests| {
                let number = requests.post(demand);
                (requests, number)
            })
            .collect();
        let deadline = Instant::now() + patience;
        for (requests, number) in posted {
            if !requests.wait(deadline, |requests| requests.is_answered(number)) {
                return Err(NotAnswered(patience));
            }
        }
        Ok(())
    }

    /// Takes the guest-physical `page` from all vCPUs, down to what is `kept`.
    /// When this returns `Ok`, nobody uses more of it, nor will without asking
    /// [`Memory::acquire`] again.
    ///
    /// Not to be called while something is held that a vCPU needs to get to a
    /// block boundary.
    pub fn revoke(
        &self,
        page: u64,
        kept: Option<Access>,
        patience: Duration,
    ) -> Result<(), NotAnswered> {
        match kept {
            Some(Access::Write) => Ok(()),
            Some(Access::Read) => {
                let keep_read = true;
                self.demand(Demand::Page { page, keep_read }, None, patience)
            }
            None => {
                self.fall(page);
                for requests in self.others(None) {
                    requests.post(Demand::Code { page });
                }
                let keep_read = false;
                self.demand(Demand::Page { page, keep_read }, None, patience)
            }
        }
    }

    /// Takes many pages from all vCPUs, and all else that they derived from guest memory.
    /// When this returns `Ok`, nobody uses any of it, nor will without asking
    /// [`Memory::acquire`] again. As [`SoftMachine::revoke`] otherwise.
    pub fn revoke_all(
        &self,
        addresses: &[Range<u64>],
        patience: Duration,
    ) -> Result<(), NotAnswered> {
        for addresses in addresses {
            let pages = addresses.clone().step_by(PAGE_SIZE as usize);
            pages.for_each(|page| self.fall(page));
        }
        self.demand(Demand::Everything, None, patience)
    }

    /// Has all vCPUs look for their pages anew, at their next block boundary: one that
    /// stands does so when it goes on.
    pub fn look_anew(&self) {
        for requests in self.others(None) {
            requests.ask(request::LOOK_ANEW);
        }
    }

    /// A device wrote into guest memory: blocks decoded from there are void.
    /// Called after the bytes are there.
    pub fn written(&self, range: Range<u64>) {
        // The bytes before the look at the page's state: who marks the page and
        // reads them does it in the other order, so one of the two sees the other.
        fence(Ordering::SeqCst);
        let mut page = range.start & !(PAGE_SIZE - 1);
        while page < range.end {
            if self.holds_code(page) {
                self.code_written(page, None);
            }
            page += PAGE_SIZE;
        }
    }

    /// Whether somebody decoded from `page`, or is about to.
    pub fn holds_code(&self, page: u64) -> bool {
        self.word(page)
            .is_some_and(|word| word.load(Ordering::SeqCst) & STATE != NONE)
    }

    /// `page` is about to be written to, or was: its blocks die at every other
    /// vCPU's next block boundary. `own`'s thread sees to its own.
    pub fn code_written(&self, page: u64, own: Option<&Arc<VcpuRequests>>) {
        self.fall(page);
        for requests in self.others(own) {
            requests.post(Demand::Code { page });
        }
    }

    /// Starts to mark `page` as code: `None` when it is already, else what
    /// [`SoftMachine::finish_marking`] wants once all write tags are gone.
    pub fn start_marking(&self, page: u64) -> Option<u32> {
        let word = self.word(page)?;
        let mut value = word.load(Ordering::SeqCst);
        loop {
            match value & STATE {
                CODE => return None,
                MARKING => return Some(value),
                _ => {
                    let marking = value | MARKING;
                    match word.compare_exchange(value, marking, Ordering::SeqCst, Ordering::SeqCst)
                    {
                        Ok(_) => return Some(marking),
                        Err(now) => value = now,
                    }
                }
            }
        }
    }

    /// Marks `page` as code; false when it fell since.
    pub fn finish_marking(&self, page: u64, marking: u32) -> bool {
        let code = marking & !STATE | CODE;
        self.word(page).is_some_and(|word| {
            match word.compare_exchange(marking, code, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => true,
                Err(now) => now == code,
            }
        })
    }

    fn fall(&self, page: u64) {
        let Some(word) = self.word(page) else { return };
        let mut value = word.load(Ordering::SeqCst);
        while value & STATE != NONE {
            let fallen = (value & !STATE).wrapping_add(VERSION);
            match word.compare_exchange(value, fallen, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(now) => value = now,
            }
        }
    }

    fn word(&self, page: u64) -> Option<&AtomicU32> {
        self.code.get((page / PAGE_SIZE) as usize)
    }

    /// Waits until every vCPU but `own` is outside and keeps them there until
    /// the guard is dropped. `own`'s thread must be outside too when it calls;
    /// `None` when some vCPU did not come out in time.
    pub fn exclude<'machine>(
        &'machine self,
        own: &Arc<VcpuRequests>,
        patience: Duration,
    ) -> Option<Exclusion<'machine>> {
        let guard = self
            .exclusive
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let others = self.others(Some(own));
        for requests in &others {
            requests.ask(request::EXCLUSIVE);
        }
        let exclusion = Exclusion {
            others,
            _guard: guard,
        };
        let deadline = Instant::now() + patience;
        let out = exclusion
            .others
            .iter()
            .all(|requests| requests.wait(deadline, VcpuRequests::is_outside));
        out.then_some(exclusion)
    }

    /// A vCPU's thread, outside: waits until nobody needs it to be any more.
    pub fn wait_while_excluded(&self) {
        drop(
            self.exclusive
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

/// All vCPUs but one are outside.
pub struct Exclusion<'machine> {
    others: Vec<Arc<VcpuRequests>>,
    _guard: MutexGuard<'machine, ()>,
}

impl Drop for Exclusion<'_> {
    fn drop(&mut self) {
        for requests in &self.others {
            requests.take(request::EXCLUSIVE);
        }
    }
}
