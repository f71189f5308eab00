//! A machine's console as a stream of events.

use std::future::Future;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::body::Bytes;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::timeout;
use weft_cluster::{ClusterError, ConsoleNews, ConsoleView};

use crate::listen::EVENT_BOUND;

/// Consoles of one server that are open at the same time: each has a thread now and then.
pub(crate) const OPEN_MAX: usize = 16;
/// How long a thread waits for news. A console that has none says that it lives.
const WAIT: Duration = Duration::from_secs(2);

/// Sends what a machine says, until that ends, the client has gone, reads nothing, or may not
/// look any more. `place`: held meanwhile.
pub(crate) async fn tell<Looks, Asked>(
    mut view: ConsoleView,
    may_look: Looks,
    sender: mpsc::Sender<Bytes>,
    place: OwnedSemaphorePermit,
) where
    Looks: Fn() -> Asked,
    Asked: Future<Output = bool>,
{
    loop {
        let waited = tokio::task::spawn_blocking(move || {
            let news = view.next(WAIT);
            (view, news)
        });
        let Ok((again, news)) = waited.await else {
            return;
        };
        view = again;
        let may_look = may_look().await;
        let is_last = !may_look || !matches!(news, Ok(None | Some(ConsoleNews::Output(_))));
        let event = match may_look {
            true => event(news),
            false => closed("the key has ended"),
        };
        let sent = timeout(EVENT_BOUND, sender.send(event.into())).await;
        if is_last || !matches!(sent, Ok(Ok(()))) {
            break;
        }
    }
    // Giving the lease back waits for the store.
    drop(tokio::task::spawn_blocking(move || drop((view, place))));
}

fn event(news: Result<Option<ConsoleNews>, ClusterError>) -> String {
    match news {
        Ok(Some(ConsoleNews::Output(bytes))) => {
            format!("event: output\ndata: \"{}\"\n\n", STANDARD.encode(bytes))
        }
        // A comment shows that the server lives.
        Ok(None) => ":\n\n".into(),
        Ok(Some(ConsoleNews::Closed(why))) => closed(&why),
        Err(error) => closed(&error.to_string()),
    }
}

fn closed(why: &str) -> String {
    let why = serde_json::to_string(why).unwrap_or_default();
    format!("event: closed\ndata: {why}\n\n")
}
