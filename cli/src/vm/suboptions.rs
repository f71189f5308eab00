//! Values with options of their own: `F,ro,direct`, `user,forward=2222:22`,
//! `socket=PATH`. Read here, judged in [`super::plan`].

use std::path::PathBuf;
use std::str::FromStr;

/// How alike two words must be for one to be a misspelling of the other.
const LIKENESS_MIN: f64 = 0.6;

/// `--disk FILE[,ro][,direct]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskArg {
    /// The image or block device.
    pub path: PathBuf,
    /// The guest may not write.
    pub read_only: bool,
    /// Past the host's page cache.
    pub direct: bool,
}

/// `--net tap=NAME` or `--net user[,forward=HOSTPORT:GUESTPORT]…[,loopback]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetArg {
    /// A tap device of the host.
    Tap(String),
    /// A network in user space.
    User {
        /// Ways in: host port, guest port.
        forwards: Vec<(u16, u16)>,
        /// The gateway is this host's loopback.
        loopback: bool,
    },
}

/// `--console stdio` or `--console socket=PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConsoleArg {
    /// Standard input and output.
    Stdio,
    /// A UNIX socket; in the run directory when no path is given.
    Socket(Option<PathBuf>),
}

impl FromStr for DiskArg {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskArg, String> {
        let (path, options) = split(text);
        if path.is_empty() {
            return Err("lacks the image's name: write FILE[,ro][,direct]".into());
        }
        let mut disk = DiskArg {
            path: path.into(),
            read_only: false,
            direct: false,
        };
        for option in options {
            match option {
                "ro" => disk.read_only = true,
                "direct" => disk.direct = true,
                _ => return Err(unknown(option, "a disk", &["ro", "direct"])),
            }
        }
        Ok(disk)
    }
}

impl FromStr for NetArg {
    type Err = String;

    fn from_str(text: &str) -> Result<NetArg, String> {
        let (kind, options) = split(text);
        match kind.split_once('=') {
            Some(("tap", "")) => Err("`tap=` lacks the device's name".into()),
            Some(("tap", name)) => match options.first() {
                None => Ok(NetArg::Tap(name.to_owned())),
                Some(option) => Err(unknown(option, "a tap", &[])),
            },
            None if kind == "user" => {
                let (loopback, forwards): (Vec<_>, Vec<_>) = options
                    .into_iter()
                    .partition(|option| *option == "loopback");
                let forwards = forwards.into_iter().map(parse_forward);
                Ok(NetArg::User {
                    forwards: forwards.collect::<Result<_, _>>()?,
                    loopback: !loopback.is_empty(),
                })
            }
            None if kind == "tap" => Err("`tap` lacks the device's name: write tap=NAME".into()),
            _ => Err(unknown(kind, "a network", &["tap=NAME", "user"])),
        }
    }
}

fn parse_forward(option: &str) -> Result<(u16, u16), String> {
    let Some(("forward", ports)) = option.split_once('=') else {
        let known = ["forward=HOSTPORT:GUESTPORT", "loopback"];
        return Err(unknown(option, "a user-mode network", &known));
    };
    let port = |text: &str| match text.parse::<u16>() {
        Ok(0) | Err(_) => Err(format!("`{text}` in `{option}` is not a port: 1 to 65535")),
        Ok(port) => Ok(port),
    };
    match ports.split_once(':') {
        Some((host, guest)) => Ok((port(host)?, port(guest)?)),
        None => Err(format!(
            "`{option}` lacks a port: write forward=HOSTPORT:GUESTPORT"
        )),
    }
}

impl FromStr for ConsoleArg {
    type Err = String;

    fn from_str(text: &str) -> Result<ConsoleArg, String> {
        match (text, text.strip_prefix("socket=")) {
            ("stdio", _) => Ok(ConsoleArg::Stdio),
            ("socket", _) => Ok(ConsoleArg::Socket(None)),
            (_, Some("")) => Err("`socket=` lacks the socket's path".into()),
            (_, Some(path)) => Ok(ConsoleArg::Socket(Some(path.into()))),
            _ => Err(unknown(text, "a console", &["stdio", "socket=PATH"])),
        }
    }
}

/// The value, and what follows its commas.
fn split(text: &str) -> (&str, Vec<&str>) {
    let mut parts = text.split(',');
    (parts.next().unwrap_or_default(), parts.collect())
}

/// Says that `option` means nothing to `what`, and what may have been meant.
fn unknown(option: &str, what: &str, known: &[&str]) -> String {
    let word = |option: &str| option.split('=').next().unwrap_or_default().to_owned();
    let likeness = |known: &str| strsim::jaro_winkler(&word(option), &word(known));
    let nearest = known
        .iter()
        .map(|known| (likeness(known), *known))
        .filter(|(likeness, _)| *likeness >= LIKENESS_MIN)
        .max_by(|(one, _), (other, _)| one.total_cmp(other));
    let advice = match (nearest, known) {
        (Some((_, nearest)), _) => format!("did you mean `{nearest}`?"),
        (None, []) => "it has none".to_owned(),
        (None, known) => format!("it takes {}", known.join(", ")),
    };
    format!("`{option}` is no option of {what}: {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error<T: FromStr<Err = String> + std::fmt::Debug>(text: &str) -> String {
        text.parse::<T>().unwrap_err()
    }

    #[test]
    fn disks() {
        let disk: DiskArg = "a/b.img,direct,ro".parse().unwrap();
        assert_eq!(disk.path, PathBuf::from("a/b.img"));
        assert!(disk.read_only && disk.direct);
        assert!(!"x".parse::<DiskArg>().unwrap().read_only);
        assert!(error::<DiskArg>(",ro").contains("lacks"));
        assert_eq!(
            error::<DiskArg>("x,dierct"),
            "`dierct` is no option of a disk: did you mean `direct`?"
        );
        assert!(error::<DiskArg>("x,").contains("it takes ro, direct"));
    }

    #[test]
    fn networks() {
        assert_eq!("tap=t0".parse(), Ok(NetArg::Tap("t0".into())));
        let user = |forwards, loopback| Ok(NetArg::User { forwards, loopback });
        assert_eq!("user".parse(), user(vec![], false));
        let two = "user,forward=2222:22,loopback,forward=8080:80".parse();
        assert_eq!(two, user(vec![(2222, 22), (8080, 80)], true));
        assert!(error::<NetArg>("tap").contains("tap=NAME"));
        assert!(error::<NetArg>("tap=").contains("lacks"));
        assert!(error::<NetArg>("usr").contains("did you mean `user`?"));
        assert!(error::<NetArg>("user,foward=1:2").contains("did you mean `forward="));
        assert!(error::<NetArg>("user,lopback").contains("did you mean `loopback`?"));
        assert!(error::<NetArg>("user,forward=0:22").contains("`0` in `forward=0:22`"));
        assert!(error::<NetArg>("user,forward=1:70000").contains("`70000`"));
        assert!(error::<NetArg>("user,forward=22").contains("HOSTPORT:GUESTPORT"));
    }

    #[test]
    fn consoles() {
        assert_eq!("stdio".parse(), Ok(ConsoleArg::Stdio));
        assert_eq!("socket".parse(), Ok(ConsoleArg::Socket(None)));
        let at = ConsoleArg::Socket(Some("/x".into()));
        assert_eq!("socket=/x".parse(), Ok(at));
        assert!(error::<ConsoleArg>("studio").contains("did you mean `stdio`?"));
        assert!(error::<ConsoleArg>("socket=").contains("lacks"));
    }
}
