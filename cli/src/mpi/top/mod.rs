//! `weft mpi top`: a cluster on a terminal, all the time.
//!
//! A thread asks the launcher, so that keys are answered while the launcher is slow. It asks one
//! thing after the other: what a key changed is in the status that is read next.
//!
//! | file | holds |
//! | --- | --- |
//! | `screen` | what is shown and chosen, and what keys mean: no terminal |
//! | `shares` | how many rows each part gets |
//! | `text` | words and the program's output in rows of a bounded width |
//! | `draw` | all of that on the terminal |

mod draw;
mod screen;
mod shares;
mod text;

use std::io::{ErrorKind, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use weft_mpi::launcher;
use weft_mpi::request::{self, Answer, Output, Request, Status};

use super::status::status_of;
use crate::top::pressed_key;
use screen::{Act, Screen};

/// How often the launcher is asked.
const PERIOD: Duration = Duration::from_secs(1);
/// Bytes of each of the program's streams: more than a large terminal shows.
const OUTPUT_BYTES: u64 = 32 << 10;

/// What the asking thread sends.
enum News {
    Read(Box<Status>, Output),
    /// Of a key: a sentence, and whether it was refused.
    Answered(String, bool),
    /// The same, of a file for all machines.
    Deployed(String, bool),
    /// The status cannot be read now.
    Trouble(String),
    /// No launcher is there any more.
    Gone {
        /// Whether something of the cluster is left.
        is_left: bool,
    },
}

/// `weft mpi top`.
pub fn run(name: Option<String>) -> anyhow::Result<ExitCode> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("`weft mpi top` needs a terminal: `weft mpi status` prints the same once");
    }
    let name = super::one(name)?;
    // What the first reading cannot get is told before the screen is taken.
    let mut screen = Screen::new(status_of(&name)?);
    let socket = launcher::requests_socket(&name)?;
    let (requests, to_ask) = channel();
    let (news, arrived) = channel();
    spawn("weft-ask", move || {
        Asker { name, socket, news }.ask_on(&to_ask)
    })?;
    // Restores the terminal on a panic, too.
    let mut terminal = ratatui::try_init().context("cannot take the terminal")?;
    let outcome = show(&mut terminal, &mut screen, &requests, &arrived);
    ratatui::restore();
    outcome?;
    if let Some(end) = &screen.end {
        eprintln!("weft: {end}");
    }
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
    requests: &Sender<Request>,
    arrived: &Receiver<News>,
) -> anyhow::Result<()> {
    let mut read_at = Instant::now();
    loop {
        for news in arrived.try_iter() {
            match news {
                News::Read(status, output) => {
                    read_at = Instant::now();
                    screen.read(*status, output);
                }
                News::Answered(sentence, is_refused) => screen.answered(sentence, is_refused),
                News::Deployed(sentence, is_refused) => screen.say(sentence, is_refused),
                News::Trouble(why) => screen.trouble(why),
                News::Gone { is_left } => screen.gone(is_left),
            }
        }
        screen.age(read_at.elapsed());
        terminal
            .draw(|frame| draw::draw(frame, screen))
            .context("cannot draw")?;
        let Some(key) = pressed_key()? else {
            continue;
        };
        match screen.key(key) {
            None => {}
            Some(Act::Quit) => return Ok(()),
            // Without a thread there is no launcher either, and the screen has heard that.
            Some(Act::Ask(request)) => drop(requests.send(request)),
        }
    }
}

/// The thread that asks the launcher.
struct Asker {
    name: String,
    socket: PathBuf,
    news: Sender<News>,
}

impl Asker {
    fn ask_on(&self, requests: &Receiver<Request>) {
        loop {
            let begun = Instant::now();
            let news = match self.read() {
                Ok((status, output)) => News::Read(status, output),
                Err(_) if self.is_gone() => {
                    let is_left = launcher::names().is_ok_and(|names| names.contains(&self.name));
                    let _ = self.news.send(News::Gone { is_left });
                    return;
                }
                Err(error) => News::Trouble(format!("{error:#}")),
            };
            if self.news.send(news).is_err() {
                return;
            }
            match requests.recv_timeout(PERIOD.saturating_sub(begun.elapsed())) {
                Ok(Request::Deploy(file)) => self.deploy(&file),
                Ok(request) => {
                    let (said, is_refused) = answer(&self.socket, &request);
                    let _ = self.news.send(News::Answered(said, is_refused));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn read(&self) -> anyhow::Result<(Box<Status>, Output)> {
        let status = status_of(&self.name)?;
        let output = match request::ask(&self.socket, &Request::Output(OUTPUT_BYTES))? {
            Answer::Output(output) => output,
            // A launcher of an earlier version does not know the request.
            _ => Output::default(),
        };
        Ok((Box::new(status), output))
    }

    /// Whether nobody listens at the socket: a slow launcher does.
    fn is_gone(&self) -> bool {
        let connected = weft_node::rundir::connect(&self.socket);
        connected.is_err_and(|error| {
            matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            )
        })
    }

    /// In a thread of its own: the file goes to all machines before the answer comes.
    fn deploy(&self, file: &Path) {
        let home = std::env::var_os("HOME");
        let file = match (file.strip_prefix("~"), home) {
            (Ok(rest), Some(home)) => Path::new(&home).join(rest),
            _ => file.to_owned(),
        };
        let (news, socket) = (self.news.clone(), self.socket.clone());
        let copies = move || {
            let copied = super::whole(&file);
            let (said, is_refused) = match copied {
                Ok(file) => answer(&socket, &Request::Deploy(file)),
                Err(error) => (format!("{error:#}"), true),
            };
            let _ = news.send(News::Deployed(said, is_refused));
        };
        if let Err(error) = spawn("weft-deploy", copies) {
            let _ = self.news.send(News::Deployed(format!("{error:#}"), true));
        }
    }
}

/// A sentence, and whether the request was refused.
fn answer(socket: &Path, request: &Request) -> (String, bool) {
    match request::ask(socket, request) {
        Ok(Answer::Done(sentence)) => (sentence, false),
        Ok(Answer::Refused(why)) => (why, true),
        Ok(Answer::Status(_) | Answer::Output(_)) => ("an answer to another request".into(), true),
        Err(error) => (format!("{error:#}"), true),
    }
}
