//! `weft top`: the cluster on a terminal, all the time.
//!
//! A thread reads the cluster, so that keys are answered while the store is slow. What keys do is
//! a change in the store; what follows is seen like everything else.
//!
//! | file | holds |
//! | --- | --- |
//! | `screen` | what is shown and chosen, and what keys mean: no terminal |
//! | `draw` | that on the terminal |

mod draw;
mod screen;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use crossterm::event::{self, Event, KeyEventKind};
use weft_cluster::{Cluster, ClusterError, Cordon, LogRecord, Overview};
use weft_node::member::Membership;

use screen::{Act, Screen};

pub use screen::Key;

/// How often the cluster is read.
const PERIOD: Duration = Duration::from_secs(1);
/// How long a key is waited for before what is new is drawn.
const FRAME: Duration = Duration::from_millis(100);

/// What the reading thread sends.
enum News {
    Read(Box<Overview>, Vec<LogRecord>),
    /// A sentence.
    Trouble(String),
}

/// `weft top`.
pub fn run() -> anyhow::Result<ExitCode> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("`weft top` needs a terminal: `weft plan` prints the same once, also as JSON");
    }
    let (_, cluster) = Membership::joined()?;
    // What the first reading cannot get is told before the screen is taken.
    let (overview, log) = (cluster.overview()?, cluster.log()?);
    let mut screen = Screen::new(overview, log);
    let (acts, to_do) = channel();
    let (news, arrived) = channel();
    let reads = cluster.clone();
    let last = screen.last_record();
    spawn("weft-read", move || read_on(&reads, last, &news))?;
    let (failed, failures) = channel();
    spawn("weft-act", move || act_on(&cluster, &to_do, &failed))?;
    // Restores the terminal on a panic, too.
    let mut terminal = ratatui::try_init().context("cannot take the terminal")?;
    let outcome = show(&mut terminal, &mut screen, &acts, &arrived, &failures);
    ratatui::restore();
    outcome?;
    Ok(ExitCode::SUCCESS)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map(drop)
        .context("cannot make a thread")
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    screen: &mut Screen,
    acts: &Sender<Act>,
    arrived: &Receiver<News>,
    failures: &Receiver<String>,
) -> anyhow::Result<()> {
    loop {
        for news in arrived.try_iter() {
            match news {
                News::Read(overview, log) => screen.read(*overview, log),
                News::Trouble(why) => screen.trouble(why),
            }
        }
        for failure in failures.try_iter() {
            screen.say(failure);
        }
        terminal
            .draw(|frame| draw::draw(frame, screen))
            .context("cannot draw")?;
        let Some(key) = pressed_key()? else {
            continue;
        };
        match screen.key(key) {
            None => {}
            Some(Act::Quit) => return Ok(()),
            // The thread lasts as long as this.
            Some(act) => drop(acts.send(act)),
        }
    }
}

/// The key that was pressed within [`FRAME`], if it means something on a page.
pub fn pressed_key() -> anyhow::Result<Option<Key>> {
    if !event::poll(FRAME).context("cannot read keys")? {
        return Ok(None);
    }
    Ok(match event::read().context("cannot read keys")? {
        Event::Key(pressed) if pressed.kind == KeyEventKind::Press => Key::of(&pressed),
        _ => None,
    })
}

fn read_on(cluster: &Cluster, mut last: u64, news: &Sender<News>) {
    loop {
        let begun = Instant::now();
        let read = || -> Result<_, ClusterError> {
            let log = cluster.log_after(last)?;
            Ok((cluster.overview()?, log))
        };
        let what = match read() {
            Ok((overview, log)) => {
                last = log.last().map_or(last, |record| record.number);
                News::Read(Box::new(overview), log)
            }
            Err(error) => News::Trouble(error.to_string()),
        };
        if news.send(what).is_err() {
            return;
        }
        std::thread::sleep(PERIOD.saturating_sub(begun.elapsed()));
    }
}

fn act_on(cluster: &Cluster, acts: &Receiver<Act>, failed: &Sender<String>) {
    for act in acts {
        let cordon =
            |host: &str, cordoned, draining| cluster.cordon(host, Cordon { cordoned, draining });
        let outcome = match &act {
            Act::Cordon(host) => cordon(host, true, false),
            Act::Drain(host) => cordon(host, true, true),
            Act::Uncordon(host) => cordon(host, false, false),
            Act::HandsOff(hands_off) => cluster.set_hands_off(*hands_off),
            Act::Quit => return,
        };
        if let Err(error) = outcome {
            let _ = failed.send(error.to_string());
        }
    }
}
