//! Which request does what. No sockets here.

use hyper::{Method, StatusCode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use weft_cluster::{Cluster, ClusterError, Cordon, MoveWish, Role};

use crate::OPENAPI;
use crate::listen::BodyError;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Something that never changes: its type and itself.
    File(&'static str, &'static str),
    Session,
    Overview,
    Log,
    Events,
    Metrics,
    /// A machine's console: a stream of what it says.
    Console(String),
    Change(Change),
}

/// What changes something in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Cordon { host: String, cordon: Cordon },
    Evacuate { host: String },
    Move { name: String },
    CallOff { name: String },
    Type { name: String },
    HandsOff,
    Policy,
    Forget { name: String },
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
pub(crate) const JSON: &str = "application/json";

/// Every route, as `openapi.json` writes it. A part in braces is a name.
const ROUTES: [(Method, &str); 20] = [
    (Method::GET, "/"),
    (Method::GET, "/page.css"),
    (Method::GET, "/page.js"),
    (Method::GET, "/v1/openapi.json"),
    (Method::GET, "/v1/session"),
    (Method::GET, "/v1/overview"),
    (Method::GET, "/v1/log"),
    (Method::GET, "/v1/events"),
    (Method::GET, "/metrics"),
    (Method::POST, "/v1/hosts/{name}/cordon"),
    (Method::POST, "/v1/hosts/{name}/drain"),
    (Method::POST, "/v1/hosts/{name}/uncordon"),
    (Method::POST, "/v1/hosts/{name}/evacuate"),
    (Method::POST, "/v1/work/{name}/forget"),
    (Method::POST, "/v1/work/{name}/move"),
    (Method::POST, "/v1/work/{name}/cancel"),
    (Method::GET, "/v1/work/{name}/console"),
    (Method::POST, "/v1/work/{name}/console"),
    (Method::PUT, "/v1/hands-off"),
    (Method::PUT, "/v1/policy"),
];

impl Operation {
    /// What it takes; `None`: nothing.
    pub fn role(&self) -> Option<Role> {
        match self {
            Operation::File(..) => None,
            Operation::Session
            | Operation::Overview
            | Operation::Log
            | Operation::Events
            | Operation::Metrics => Some(Role::Look),
            Operation::Console(_)
            | Operation::Change(
                Change::Move { .. } | Change::CallOff { .. } | Change::Type { .. },
            ) => Some(Role::Use),
            Operation::Change(_) => Some(Role::Run),
        }
    }
}

/// The operation of a request, or why it has none.
pub(crate) fn find(method: &Method, path: &str) -> Result<Operation, Failure> {
    let mut allowed = None;
    for (allows, route) in &ROUTES {
        if let Some(name) = matched(route, path) {
            // HEAD gets the answer of GET; the server leaves the body out.
            if allows == method || (allows == Method::GET && method == Method::HEAD) {
                return Ok(operation(allows, route, name));
            }
            allowed = Some(allows.clone());
        }
    }
    Err(match allowed {
        Some(method) => Failure::Method(method),
        None => Failure::NoRoute(path.into()),
    })
}

/// The name in a path of this route; empty where the route has none.
fn matched<'a>(route: &str, path: &'a str) -> Option<&'a str> {
    match route.split_once("{name}") {
        None => (route == path).then_some(""),
        Some((before, after)) => {
            let name = path.strip_prefix(before)?.strip_suffix(after)?;
            (!name.is_empty() && !name.contains('/')).then_some(name)
        }
    }
}

fn operation(method: &Method, route: &str, name: &str) -> Operation {
    let cordon = |cordoned, draining| {
        let (host, cordon) = (name.to_owned(), Cordon { cordoned, draining });
        Operation::Change(Change::Cordon { host, cordon })
    };
    match route {
        "/" => Operation::File(HTML, include_str!("page/index.html")),
        "/page.css" => Operation::File(CSS, include_str!("page/page.css")),
        "/page.js" => Operation::File(SCRIPT, include_str!("page/page.js")),
        "/v1/openapi.json" => Operation::File(JSON, OPENAPI),
        "/v1/session" => Operation::Session,
        "/v1/overview" => Operation::Overview,
        "/v1/log" => Operation::Log,
        "/v1/events" => Operation::Events,
        "/metrics" => Operation::Metrics,
        "/v1/hosts/{name}/cordon" => cordon(true, false),
        "/v1/hosts/{name}/drain" => cordon(true, true),
        "/v1/hosts/{name}/uncordon" => cordon(false, false),
        "/v1/hosts/{name}/evacuate" => Operation::Change(Change::Evacuate { host: name.into() }),
        "/v1/work/{name}/move" => Operation::Change(Change::Move { name: name.into() }),
        "/v1/work/{name}/cancel" => Operation::Change(Change::CallOff { name: name.into() }),
        "/v1/work/{name}/forget" => Operation::Change(Change::Forget { name: name.into() }),
        "/v1/work/{name}/console" if method == Method::GET => Operation::Console(name.into()),
        "/v1/work/{name}/console" => Operation::Change(Change::Type { name: name.into() }),
        "/v1/policy" => Operation::Change(Change::Policy),
        _ => Operation::Change(Change::HandsOff),
    }
}

/// The body of `PUT /v1/hands-off`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HandsOff {
    hands_off: bool,
}

/// The body of `PUT /v1/policy`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ByPolicy {
    policy: String,
}

/// The body of `POST /v1/work/{name}/console`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Typed {
    typed: String,
}

/// The body of `POST /v1/hosts/{name}/evacuate`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Evacuate {
    why: String,
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| Failure::Body(error.to_string()))
}

/// Carries a change out. It waits for the store, within its bounds.
pub(crate) fn change(cluster: &Cluster, change: &Change, body: &[u8]) -> Result<(), Failure> {
    match change {
        Change::Cordon { host, cordon } => cluster.cordon(host, *cordon)?,
        Change::Forget { name } => cluster.forget_work(name)?,
        Change::Evacuate { host } => cluster.evacuate(host, &read::<Evacuate>(body)?.why)?,
        Change::CallOff { name } => cluster.call_off(name)?,
        Change::Type { name } => {
            cluster.type_into_console(name, read::<Typed>(body)?.typed.as_bytes())?;
        }
        Change::Move { name } => cluster.wish(name, &read::<MoveWish>(body)?)?,
        Change::Policy => cluster.set_policy(&read::<ByPolicy>(body)?.policy)?,
        Change::HandsOff => cluster.set_hands_off(read::<HandsOff>(body)?.hands_off)?,
    }
    Ok(())
}

/// Why a request was not served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0} does not exist: /v1/openapi.json describes the API")]
    NoRoute(String),
    #[error("this path takes {0}")]
    Method(Method),
    #[error("no key, or one that is unknown or too old: `weft cluster access make` makes one")]
    NoKey,
    #[error(
        "the role of this key does not allow that: `weft cluster access make --role` makes another"
    )]
    Role,
    #[error("the body is not what this path takes: {0}")]
    Body(String),
    #[error(transparent)]
    NoBody(#[from] BodyError),
    #[error("{0} consoles are open: close one")]
    Busy(usize),
    #[error("the cluster cannot be read: {0}")]
    Unreachable(String),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// The body of every answer that is no success.
#[derive(Serialize)]
struct ErrorBody {
    error: ErrorView,
}

#[derive(Serialize)]
struct ErrorView {
    /// A word for programs.
    code: &'static str,
    /// A sentence for people.
    message: String,
}

impl Failure {
    pub fn status(&self) -> StatusCode {
        self.kind().0
    }

    fn kind(&self) -> (StatusCode, &'static str) {
        match self {
            Failure::NoRoute(_) => (StatusCode::NOT_FOUND, "not_found"),
            Failure::Method(_) => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Failure::NoKey => (StatusCode::UNAUTHORIZED, "no_key"),
            Failure::Role => (StatusCode::FORBIDDEN, "forbidden"),
            Failure::Body(_)
            | Failure::Cluster(ClusterError::Trouble(_) | ClusterError::Policy(_)) => {
                (StatusCode::BAD_REQUEST, "bad_request")
            }
            Failure::NoBody(BodyError::TooLarge(_)) => (StatusCode::PAYLOAD_TOO_LARGE, "too_large"),
            Failure::NoBody(_) => (StatusCode::BAD_REQUEST, "bad_request"),
            Failure::Busy(_) => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
            Failure::Unreachable(_) | Failure::Cluster(ClusterError::Store(_)) => {
                (StatusCode::SERVICE_UNAVAILABLE, "unavailable")
            }
            Failure::Cluster(ClusterError::NoSuchHost(_) | ClusterError::NoSuchWork(_)) => {
                (StatusCode::NOT_FOUND, "not_found")
            }
            Failure::Cluster(_) => (StatusCode::CONFLICT, "conflict"),
        }
    }

    pub fn body(&self) -> String {
        let error = ErrorView {
            code: self.kind().1,
            message: self.to_string(),
        };
        serde_json::to_string(&ErrorBody { error }).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_every_route_and_no_other() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).unwrap();
        let mut described = Vec::new();
        for (path, operations) in document["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                let method: Method = method.to_uppercase().parse().unwrap();
                let found = find(&method, &path.replace("{name}", "x")).unwrap();
                let open = operation["security"] == serde_json::json!([]);
                assert_eq!(open, found.role().is_none(), "{path}");
                let role = operation["x-weft-role"].as_str();
                assert_eq!(role, found.role().map(Role::name), "{path}");
                described.push((method, path.clone()));
            }
        }
        let mut served: Vec<(Method, String)> = ROUTES
            .iter()
            .map(|(method, path)| (method.clone(), (*path).to_owned()))
            .collect();
        let by_path = |one: &(Method, String), other: &(Method, String)| one.1.cmp(&other.1);
        served.sort_by(by_path);
        described.sort_by(by_path);
        assert_eq!(served, described);
    }

    #[test]
    fn other_methods_and_paths_are_refused_by_what_they_are() {
        let refused = |method, path| find(&method, path).unwrap_err().status().as_u16();
        assert_eq!(refused(Method::POST, "/v1/overview"), 405);
        assert_eq!(refused(Method::GET, "/v1/hosts/alpha/drain"), 405);
        for path in [
            "/v1",
            "/v1/hosts//drain",
            "/v1/hosts/a/b/drain",
            "/../x",
            "",
        ] {
            assert_eq!(refused(Method::POST, path), 404, "{path}");
        }
    }
}
