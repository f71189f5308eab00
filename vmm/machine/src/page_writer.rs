//! The thread of a slice that writes its pages to a file of a checkpoint.
//!
//! ```text
//!         cut, at a rest of all slices          all is written, or it failed
//!  Idle ─────────────────────────────▶ Writing ──────────────────────────────▶ Over
//!   ▲                                                                           │
//!   └───────────────────────────── the next cut ◀───────────────────────────────┘
//! ```
//!
//! After the cut the machine may go on: the memory copies a page before it changes. With vCPUs
//! in KVM, and in a machine of one slice that stays alone, nothing can do that: there the cut
//! itself writes all pages, and the machine must stand until it returns.
//!
//! A confined process can start no thread, so this one waits for its work from the start. Before
//! all saves, it reads what a restored machine has not yet needed of its checkpoint.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use weft_aggregate::commands::{SaveReport, SliceReply};
use weft_aggregate::{RemoteFile, Slice};
use weft_checkpoint::{Identity, PAGE_BYTES, PagesWriter, Written, write_tables};
use weft_coherent_memory::{SavedPages, SharedMemory};
use weft_confine::{ThreadKind, lock};
use weft_guest_memory::{GuestBytes, Ram};

use super::MachineError;

/// A slice's pages for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewPages {
    /// Those of all files of the set.
    pub identity: Identity,
    /// The number of the slice's file.
    pub file: u32,
    /// Those of the set that has the pages which did not change since.
    pub base: Option<Identity>,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Writing {
    /// No save has begun.
    Idle,
    /// So many pages are left.
    Left(u64),
    /// All pages are in the file, or why not.
    Over(Result<Written, String>),
}

/// A file, here or at slice 0.
pub(super) type PagesOutput = Box<dyn Write + Send>;

/// A file on this slice's host; what stands before and behind its pages goes to slice 0, too.
pub(super) struct FileOnHost {
    file: File,
    length: u64,
    tables: RemoteFile,
}

impl FileOnHost {
    /// `file` is empty.
    pub fn new(file: File, tables: RemoteFile) -> Self {
        Self {
            file,
            length: 0,
            tables,
        }
    }
}

impl Write for FileOnHost {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.length += count as u64;
        Ok(count)
    }

    /// The file is finished. It is on disk before slice 0 knows it.
    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        write_tables(&self.file, self.length, &mut self.tables)
    }
}

/// An order for the thread.
enum Order {
    /// Read the pages that are still in the files of a checkpoint.
    Load,
    Write {
        identity: Identity,
        writer: PagesWriter<PagesOutput>,
    },
}

/// One slice's part in saves.
pub struct PageWriter {
    ram: Ram,
    /// `None` if the machine has one slice that stays alone.
    slice: Option<Arc<Slice>>,
    /// The machine may go on while pages are written.
    cuts: bool,
    orders: SyncSender<Order>,
    state: Mutex<State>,
}

struct State {
    writing: Writing,
    /// The last set that has all pages of this slice: those that did not change since are known.
    kept: Option<Identity>,
}

impl PageWriter {
    /// Starts the thread. `cuts`: vCPUs ask the memory before each first use of a page.
    pub(super) fn start(
        ram: Ram,
        slice: Option<Arc<Slice>>,
        cuts: bool,
    ) -> Result<Arc<Self>, MachineError> {
        let (orders, ordered) = sync_channel(2);
        let writer = Arc::new(Self {
            ram,
            cuts: cuts && slice.is_some(),
            slice,
            orders,
            state: Mutex::new(State {
                writing: Writing::Idle,
                kept: None,
            }),
        });
        // The thread ends with the machine, which has the other end of its orders.
        let (weak, memory) = (Arc::downgrade(&writer), writer.memory().cloned());
        weft_confine::spawn("weft-save", ThreadKind::Device, move || {
            while let (Ok(order), Some(memory)) = (ordered.recv(), &memory) {
                match order {
                    Order::Load => memory.load_all(),
                    Order::Write { identity, writer } => {
                        let written = write_behind(memory, writer);
                        if let Some(writer) = weak.upgrade() {
                            writer.is_over(memory, identity, written);
                        }
                    }
                }
            }
        })
        .map_err(MachineError::Thread)?;
        Ok(writer)
    }

    fn memory(&self) -> Option<&Arc<SharedMemory>> {
        self.slice.as_ref().map(|slice| slice.memory())
    }

    fn number(&self) -> usize {
        self.slice.as_ref().map_or(0, |slice| slice.number())
    }

    /// Whether the machine may go on while pages are written.
    pub fn cuts(&self) -> bool {
        self.cuts
    }

    /// Reads what is left in the files of the checkpoint that the machine continues.
    pub(super) fn load(&self, restored: Identity) {
        lock(&self.state).kept = Some(restored);
        // Without the thread pages are read when they are needed only.
        let _ = self.orders.try_send(Order::Load);
    }

    /// The pages that this slice owns go to `output` as they are now; all of RAM if there is one
    /// slice. While all slices rest. The machine may go on when this returns.
    ///
    /// # Errors
    /// Nothing was begun.
    pub(super) fn cut(&self, output: PagesOutput, pages: NewPages) -> Result<(), String> {
        if let Writing::Left(_) = self.writing() {
            return Err("a save is under way".into());
        }
        let number = self.number();
        let writer = PagesWriter::new(output, pages.identity, pages.file);
        let mut writer = writer.map_err(|error| failed(number, &error))?;
        let memory = self.memory().filter(|_| self.cuts);
        let Some(memory) = memory else {
            let written = self.write_now(writer);
            lock(&self.state).writing = Writing::Over(written.clone());
            return written.map(drop);
        };
        let knows_base = pages.base.is_some() && lock(&self.state).kept == pages.base;
        if memory.absent() > 0 && !knows_base {
            let left = memory.absent();
            return Err(format!(
                "{left} pages were not yet read from the checkpoint that the machine continues"
            ));
        }
        let mut unchanged = knows_base.then(Vec::<Range<u64>>::new);
        memory.cut(unchanged.as_mut())?;
        for pages in unchanged.into_iter().flatten() {
            writer.unchanged(pages);
        }
        let mut state = lock(&self.state);
        // Until it is over, nobody knows what did not change.
        state.kept = None;
        state.writing = Writing::Left(0);
        let identity = pages.identity;
        let order = Order::Write { identity, writer };
        self.orders
            .try_send(order)
            .map_err(|_| "the thread that writes pages has ended".to_owned())
    }

    /// How far it is.
    pub fn writing(&self) -> Writing {
        let writing = lock(&self.state).writing.clone();
        match (writing, self.memory()) {
            (Writing::Left(_), Some(memory)) => Writing::Left(memory.unsaved()),
            (writing, _) => writing,
        }
    }

    /// The same for the primary.
    pub(super) fn report(&self) -> SliceReply {
        match self.writing() {
            Writing::Idle => SliceReply::Refused("nothing is being saved".into()),
            Writing::Left(left_pages) => SliceReply::Saving(SaveReport {
                left_pages,
                written: None,
            }),
            Writing::Over(Err(reason)) => SliceReply::Refused(reason),
            Writing::Over(Ok(written)) => SliceReply::Saving(SaveReport {
                left_pages: 0,
                written: Some((written.pages, written.unchanged, written.bytes)),
            }),
        }
    }

    /// Ends a save that is not over: its file is of no use. The thread notices with its next page.
    pub(super) fn give_up(&self) {
        if let (Writing::Left(_), Some(memory)) = (self.writing(), self.memory()) {
            memory.end_save(false);
        }
    }

    fn is_over(&self, memory: &SharedMemory, identity: Identity, written: io::Result<Written>) {
        memory.end_save(written.is_ok());
        let mut state = lock(&self.state);
        state.kept = written.is_ok().then_some(identity);
        let number = self.number();
        state.writing = Writing::Over(written.map_err(|error| failed(number, &error)));
    }

    /// The machine stands.
    fn write_now(&self, mut writer: PagesWriter<PagesOutput>) -> Result<Written, String> {
        let number = self.number();
        let unknown = |error: io::Error| format!("cannot find pages: {error}");
        let mut bytes = [0; PAGE_BYTES];
        let mut add = |memory: &dyn GuestBytes, page: u64| match memory
            .read(page * PAGE_BYTES as u64, &mut bytes)
        {
            true => {
                let added = writer.page(page, &bytes);
                added.map_err(|error| failed(number, &error))
            }
            false => Err(format!("page {page:#x} is not memory")),
        };
        match self.memory() {
            None => {
                for range in self.ram.populated().map_err(unknown)? {
                    let page = PAGE_BYTES as u64;
                    for number in range.start / page..range.end / page {
                        add(&self.ram, number)?;
                    }
                }
            }
            Some(memory) => {
                // To read a page that the guest gave back would take memory for it again.
                let reclaimed = memory.reclaimed().map_err(unknown)?;
                for some in memory.walk() {
                    for page in memory.owned(some) {
                        if !reclaimed.has(page * PAGE_BYTES as u64) {
                            add(&**memory, page)?;
                        }
                    }
                }
                if memory.is_over() {
                    return Err("the machine has ended".into());
                }
            }
        }
        writer.finish().map_err(|error| failed(number, &error))
    }
}

fn failed(number: usize, error: &io::Error) -> String {
    format!("cannot write pages.{number}: {error}")
}

/// Writes what the cut left, while the machine goes on.
fn write_behind(
    memory: &SharedMemory,
    mut writer: PagesWriter<PagesOutput>,
) -> io::Result<Written> {
    let mut pages = SavedPages::default();
    loop {
        memory.take_saved(&mut pages).map_err(io::Error::other)?;
        if pages.is_empty() {
            return writer.finish();
        }
        for (page, bytes) in pages.iter() {
            writer.page(page, bytes)?;
        }
    }
}
