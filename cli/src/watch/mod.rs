//! `--watch`: what the aggregate is doing, while it does it.
//!
//! On a terminal a panel is pinned to the bottom rows: the rest of the screen
//! becomes the scrolling region (DECSTBM), so whatever the program writes scrolls
//! above it as usual. The alternate screen would hide that output, or be
//! disturbed by it: the program keeps the terminal as its own. For the same
//! reason the terminal is left in its mode (no raw mode, nothing is read).
//!
//! When standard error is no terminal, or one too small, a line a second is
//! printed instead.
//!
//! Invariant: the scrolling region is whole again when [`Watcher::stop`]
//! returns, and after a panic.

mod panel;
mod rates;

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weft_node::report::LiveView;
use weft_node::size::{format_bytes, format_pages};

use panel::Panel;
use rates::Rates;

use crate::summary::format_seconds;

/// How often the panel is drawn, and a line printed.
const FRAME: Duration = Duration::from_millis(200);
const LINE: Duration = Duration::from_secs(1);

/// Sentences for the user: in the panel while it is there, and on standard
/// error once it has gone.
#[derive(Clone, Default)]
pub struct Messages {
    queue: Arc<Mutex<Vec<String>>>,
}

impl Messages {
    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        // A panic aborts the process, so the lock cannot be poisoned.
        self.queue
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes a sentence.
    pub fn say(&self, text: &str) {
        self.lock().push(text.to_owned());
    }

    fn last(&self) -> Option<String> {
        self.lock().last().cloned()
    }

    fn print(&self) {
        for text in self.lock().drain(..) {
            eprintln!("weft: {text}");
        }
    }
}

/// The thread that shows.
pub struct Watcher {
    end: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    messages: Messages,
}

/// Starts showing what `live` holds.
pub fn start(live: Arc<LiveView>) -> Watcher {
    live.watch();
    let end = Arc::new(AtomicBool::new(false));
    let messages = Messages::default();
    let (ended, shown) = (end.clone(), messages.clone());
    let thread = without_signals(|| {
        std::thread::Builder::new()
            .name("weft-watch".into())
            .spawn(move || show(&live, &ended, &shown))
    });
    Watcher {
        end,
        // Only a machine out of threads refuses, and then nothing would run.
        thread: thread.expect("a thread can be made"),
        messages,
    }
}

/// Threads inherit the mask: signals are for the launcher's own thread.
fn without_signals<T>(make: impl FnOnce() -> T) -> T {
    // SAFETY: masks of this frame, filled before they are read.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let made = make();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        made
    }
}

impl Watcher {
    /// Where sentences go meanwhile.
    pub fn messages(&self) -> Messages {
        self.messages.clone()
    }

    /// Stops showing, restores the terminal, prints what was said.
    pub fn stop(self) {
        self.end.store(true, Ordering::Release);
        self.thread.thread().unpark();
        // A frame takes milliseconds, unless the terminal is held (Ctrl-S).
        let deadline = Instant::now() + Duration::from_secs(1);
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.messages.print();
    }
}

fn show(live: &LiveView, end: &AtomicBool, messages: &Messages) {
    let mut rates = Rates::default();
    let mut panel = None;
    let mut next_line = Instant::now() + LINE;
    let terminal = std::io::stderr().is_terminal();
    while !end.load(Ordering::Acquire) {
        if let Some(view) = live.view() {
            rates.take(&view, Instant::now());
            if terminal && panel.is_none() {
                panel = Panel::open(view.nodes.len());
            }
            if let Some(panel) = &mut panel {
                panel.draw(&view, &rates, messages.last().as_deref());
            } else {
                messages.print();
                if Instant::now() >= next_line {
                    next_line += LINE;
                    // Nobody reads standard error any more: nothing to tell.
                    let _ = writeln!(std::io::stderr(), "{}", line(&view, &rates));
                }
            }
        }
        std::thread::park_timeout(FRAME);
    }
    drop(panel);
}

/// The whole aggregate in one line.
fn line(view: &weft_node::report::AggregateView, rates: &Rates) -> String {
    let mut text = format!("weft: {}", format_seconds(view.wall_time_s));
    for node in &view.nodes {
        text += &format!(
            ", {} {}/{}",
            node.name,
            format_pages(node.counters.resident_pages),
            format_pages(node.budget_pages)
        );
    }
    let total = rates.total();
    text += &format!(
        ", {} pulls/s, {} pushes/s, {} jumps/s, {}/s",
        total.pulls as u64,
        total.pushes as u64,
        total.jumps as u64,
        format_bytes(total.sent_bytes as u64)
    );
    let executing = view
        .nodes
        .iter()
        .find(|node| node.node == view.executing_node);
    if let Some(node) = executing.filter(|_| view.stretched) {
        text += &format!(", executing on {}", node.name);
    }
    text
}
