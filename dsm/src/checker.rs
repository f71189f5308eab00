//! Judges of a run, which share nothing with the core but what anybody can see:
//! the actions it emits, its per-page record, its messages. Used by the
//! simulator and by the model check.
//!
//! What they judge:
//!
//! 1. At most one node may write a page; while one may, nobody else may read.
//! 2. Every copy in any memory is what was written last.
//! 3. A touched page has exactly one owner, in flight included.
//! 4. Memory and record agree; nothing is installed twice or taken from nowhere.
//! 5. When nothing is in flight, no request is unanswered, no transaction under
//!    way, and the copyset contains every holder.
//! 6. A page that was declared lost is nowhere.
//! 7. A page has one manager, an entry in flight included; none if a node died.
//! 8. When a node has left, nothing mentions it.

use crate::protocol::{Action, Body, Content, Keep, Message, Right};
use crate::state::{Entry, Local, Phase, State};
use crate::types::{Access, NodeId, Page};

/// The version of a page's content that nobody wrote yet: zero bytes.
pub const ZERO_VERSION: u32 = 0;

/// What was found wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    /// The core called a message impossible.
    #[error("{page} at {node}: {what}")]
    Violation {
        page: Page,
        /// The receiver.
        node: NodeId,
        /// What it said.
        what: &'static str,
    },
    /// Judge 1.
    #[error("{page}: a writer beside another holder, holders {holders:#b}, writers {writers:#b}")]
    Writer {
        page: Page,
        /// Nodes that can read it.
        holders: u32,
        /// Nodes that can write it.
        writers: u32,
    },
    /// Judge 2.
    #[error("{page} at {node}: holds version {version}, but {latest} was written last")]
    Stale {
        page: Page,
        /// The holder.
        node: NodeId,
        /// What it holds.
        version: u32,
        /// What it should hold.
        latest: u32,
    },
    /// Judge 3.
    #[error("{page}: {found} owners, expected {least} to {most}")]
    Owners {
        page: Page,
        /// Owner flags and ownerships in flight.
        found: u32,
        /// Least expected.
        least: u32,
        /// Most expected.
        most: u32,
    },
    /// Judge 4.
    #[error("{page} at {node}: {action} does not fit what is in memory")]
    Memory {
        page: Page,
        node: NodeId,
        action: &'static str,
    },
    /// Judge 4.
    #[error("{page} at {node}: the record says {record}, memory has {mapped:?}")]
    Record {
        page: Page,
        node: NodeId,
        record: String,
        /// The memory.
        mapped: Option<Access>,
    },
    /// Judge 5.
    #[error("{page} at {node}: {what}, and nothing is in flight")]
    Unanswered {
        page: Page,
        node: NodeId,
        /// What is unfinished.
        what: &'static str,
    },
    /// Users keep a page from the node that requested it.
    #[error("{page} at {node}: users pin it in turns while a request for it waits")]
    Turns { page: Page, node: NodeId },
    /// Judge 5.
    #[error("{page}: {node} holds a copy that the directory does not know")]
    Copyset {
        page: Page,
        /// The holder.
        node: NodeId,
    },
    /// Judge 6.
    #[error("{page} was declared lost, but {node} has it")]
    LostButHere {
        page: Page,
        /// The holder.
        node: NodeId,
    },
    /// Judge 7.
    #[error("{page}: {found} nodes manage it, entries in flight included, expected {least} to 1")]
    Managers { page: Page, found: u32, least: u32 },
    /// Judge 8.
    #[error("{node} was declared gone, but {what}")]
    NotGone { node: NodeId, what: &'static str },
    /// A node's memory.
    #[error("{node} fills {filled} pages of memory, and may fill {most}")]
    Budget {
        node: NodeId,
        /// Pages that it fills.
        filled: u64,
        /// Pages that it may fill.
        most: u64,
    },
    /// A controller gave up.
    #[error("{node}: {failure}")]
    Failed {
        node: NodeId,
        /// Its reason.
        failure: String,
    },
    /// The run went on for longer than any run can.
    #[error("no end: {0}")]
    Endless(&'static str),
}

/// One page in one node's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Frame {
    /// How it is mapped.
    pub mapped: Option<Access>,
    /// What is in it.
    pub version: u32,
}

impl Frame {
    /// Does what an action asks of memory. `incoming` is the version that came
    /// with the message being handled. Returns the version that goes out.
    ///
    /// # Errors
    /// [`Flaw::Memory`] if memory is not as the action supposes,
    /// [`Flaw::Violation`] if the core found a message impossible.
    pub fn apply(
        &mut self,
        node: NodeId,
        action: &Action,
        incoming: Option<u32>,
    ) -> Result<Option<u32>, Flaw> {
        let unfit = |page, action| Err(Flaw::Memory { page, node, action });
        match *action {
            Action::Install {
                page,
                access,
                content,
            } => {
                let version = match (content, incoming) {
                    (Content::Zero, _) => ZERO_VERSION,
                    (Content::Bytes, Some(version)) => version,
                    _ => return unfit(page, "install without bytes"),
                };
                if self.mapped.is_some() {
                    return unfit(page, "install");
                }
                self.mapped = Some(access);
                self.version = version;
            }
            Action::Allow { page } => {
                if self.mapped != Some(Access::Read) {
                    return unfit(page, "allow");
                }
                self.mapped = Some(Access::Write);
            }
            Action::Drop { page } => {
                if self.mapped.is_none() {
                    return unfit(page, "drop");
                }
                *self = Frame::default();
            }
            Action::Give { message, keep, .. } => {
                let page = message.page;
                let version = self.version;
                match (self.mapped, keep) {
                    (None, _) | (Some(Access::Write), Keep::AsIs) => return unfit(page, "give"),
                    (_, Keep::Nothing) => *self = Frame::default(),
                    (_, Keep::Shared | Keep::AsIs) => self.mapped = Some(Access::Read),
                }
                let content = match message.body {
                    Body::Data { content, .. } | Body::Push { content, .. } => content,
                    _ => return unfit(page, "give without content"),
                };
                if content == Content::Zero && version != ZERO_VERSION {
                    return unfit(page, "give of written bytes as zero");
                }
                return Ok((content == Content::Bytes).then_some(version));
            }
            Action::Violation { page, what, .. } => {
                return Err(Flaw::Violation { page, node, what });
            }
            _ => {}
        }
        Ok(None)
    }
}

/// Whether a message carries the ownership of its page.
pub fn carries_ownership(message: &Message) -> bool {
    matches!(
        message.body,
        Body::Data {
            right: Right::Exclusive,
            ..
        } | Body::Push { .. }
            | Body::NotHere
            | Body::Grant {
                content: Content::Zero
            }
    )
}

/// Counts over the live nodes for the judgement of one page.
#[derive(Debug)]
pub struct Judge {
    page: Page,
    latest: u32,
    holders: u32,
    writers: u32,
    owners: u32,
}

impl Judge {
    /// Begins the judgement of a page whose last written version is `latest`.
    pub fn new(page: Page, latest: u32) -> Judge {
        Judge {
            page,
            latest,
            holders: 0,
            writers: 0,
            owners: 0,
        }
    }

    /// Adds what one live node has.
    ///
    /// # Errors
    /// Stale content; a record that memory contradicts.
    pub fn node(&mut self, node: NodeId, frame: Frame, local: Local) -> Result<(), Flaw> {
        let page = self.page;
        let expected = match local.state() {
            State::Invalid => None,
            State::Exclusive if local.written() => Some(Access::Write),
            State::Shared | State::Exclusive => Some(Access::Read),
        };
        let lonely = local.state() == State::Exclusive && !local.owner();
        if expected != frame.mapped || lonely {
            return Err(Flaw::Record {
                page,
                node,
                record: format!("{local:?}"),
                mapped: frame.mapped,
            });
        }
        self.owners += u32::from(local.owner());
        if frame.mapped.is_some() {
            self.holders |= node.bit();
            if frame.version != self.latest {
                return Err(Flaw::Stale {
                    page,
                    node,
                    version: frame.version,
                    latest: self.latest,
                });
            }
        }
        if frame.mapped == Some(Access::Write) {
            self.writers |= node.bit();
        }
        Ok(())
    }

    /// Ends the judgement. `in_flight` ownerships are in messages that will be
    /// accepted; between `least` and `most` owners are right.
    ///
    /// # Errors
    /// Judges 1 and 3.
    pub fn verdict(&self, in_flight: u32, least: u32, most: u32) -> Result<(), Flaw> {
        if self.writers != 0 && self.holders.count_ones() > 1 {
            return Err(Flaw::Writer {
                page: self.page,
                holders: self.holders,
                writers: self.writers,
            });
        }
        let found = self.owners + in_flight;
        if found < least || found > most {
            return Err(Flaw::Owners {
                page: self.page,
                found,
                least,
                most,
            });
        }
        Ok(())
    }

    /// Judge 6: nobody holds a lost page.
    ///
    /// # Errors
    /// Somebody does.
    pub fn lost(&self) -> Result<(), Flaw> {
        match NodeId::lowest(self.holders) {
            Some(node) => Err(Flaw::LostButHere {
                page: self.page,
                node,
            }),
            None => Ok(()),
        }
    }

    /// Judge 5 at the manager, when nothing is in flight.
    ///
    /// # Errors
    /// An unfinished transaction; a holder that the directory does not know.
    pub fn idle(&self, manager: NodeId, entry: &Entry) -> Result<(), Flaw> {
        let page = self.page;
        let unfinished = |what| {
            Err(Flaw::Unanswered {
                page,
                node: manager,
                what,
            })
        };
        if !matches!(entry.phase(), Phase::Idle | Phase::Lost) {
            return unfinished("a transaction is under way");
        }
        if entry.waiting() != 0 {
            return unfinished("a request waits at the manager");
        }
        if entry.phase() == Phase::Lost {
            return self.lost();
        }
        let known = entry.copyset() | entry.owner().map_or(0, NodeId::bit);
        match NodeId::lowest(self.holders & !known) {
            Some(node) => Err(Flaw::Copyset { page, node }),
            None => Ok(()),
        }
    }
}

/// Judge 7. `managers` nodes believe to be the manager; `in_flight` entries will be
/// accepted.
///
/// # Errors
/// Not one, or none without a death.
pub fn one_manager(page: Page, managers: u32, in_flight: u32, deaths: bool) -> Result<(), Flaw> {
    let found = managers + in_flight;
    let least = u32::from(!deaths);
    if found < least || found > 1 {
        return Err(Flaw::Managers { page, found, least });
    }
    Ok(())
}

/// Judge 5 at a node, when nothing is in flight.
///
/// # Errors
/// A request or an offer under way.
pub fn idle_node(page: Page, node: NodeId, local: Local) -> Result<(), Flaw> {
    let what = if local.frozen() {
        "the page is still frozen"
    } else if local.pending().is_some() {
        "a request was never answered"
    } else if local.offered() {
        "an offer was never answered"
    } else {
        return Ok(());
    };
    Err(Flaw::Unanswered { page, node, what })
}
