//! Values with options of their own: `F,ro,direct`, `user,forward=2222:22`,
//! `socket=PATH`; and lists, a value for each node. Read here, judged in
//! [`super::plan`] and [`super::nodes`].

use std::path::PathBuf;
use std::str::FromStr;

use weft_machine::migration::Destination;
use weft_machine::{DataPath, Follow, SwitchSocket};
use weft_node::size::{SizeError, parse_size};

/// How alike two words must be for one to be a misspelling of the other.
const LIKENESS_MIN: f64 = 0.6;

/// What a disk takes.
const DISK_OPTIONS: [&str; 4] = ["ro", "direct", "node=N", "path=bypass|dsm"];

/// What a network takes, wherever its frames go.
const PLACE_OPTIONS: [&str; 2] = ["node=N", "path=bypass|dsm"];

/// Most remote faults of `--follow`.
const FOLLOW_FAULTS_MAX: u32 = 1 << 22;

/// Why a value is not what its option takes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    #[error("`{0}` is not a number of vCPUs")]
    Vcpus(String),
    #[error(transparent)]
    Size(#[from] SizeError),
    #[error("write auto, never, or a number of remote faults from 1 to {FOLLOW_FAULTS_MAX}")]
    Follow,
    #[error("lacks the host's name: write HOST or HOST=SIZE")]
    NoHost,
    #[error("lacks the image's name: write FILE[,ro][,direct][,node=N][,path=bypass|dsm]")]
    NoImage,
    #[error("`tap=` lacks the device's name")]
    NoTapName,
    #[error("`tap` lacks the device's name: write tap=NAME")]
    NoTap,
    #[error("`switch` lacks the switch's name: write switch=NAME, or switch=PATH with a slash")]
    NoSwitch,
    #[error("`{0}` in `mac={0}` is not a card's address: write one like 02:00:00:00:00:01")]
    Mac(String),
    #[error("`{0}` in `node={0}` is not a node's number: use 0 or more")]
    Node(String),
    #[error("`{0}` in `path={0}` is not a path: use bypass or dsm")]
    Path(String),
    #[error("`{port}` in `{option}` is not a port: 1 to 65535")]
    Port { port: String, option: String },
    #[error("`{0}` lacks a port: write forward=HOSTPORT:GUESTPORT")]
    NoPort(String),
    #[error("`socket=` lacks the socket's path")]
    NoSocket,
    /// With what may have been meant.
    #[error("{what} has no option `{option}`: {advice}")]
    Unknown {
        /// A disk, a network, a console.
        what: &'static str,
        option: String,
        advice: String,
    },
}

/// One value for all nodes, or one for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListArg<T> {
    /// As typed, for messages.
    pub text: String,
    /// At least one.
    pub values: Vec<T>,
}

/// `--disk FILE[,ro][,direct][,node=N][,path=bypass|dsm]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskArg {
    /// The image or block device.
    pub path: PathBuf,
    /// The guest may not write.
    pub read_only: bool,
    /// Past the host's page cache.
    pub direct: bool,
    /// Which node has it.
    pub node: u32,
    /// How its data reach the vCPUs of other nodes.
    pub data_path: DataPath,
}

/// `--net tap=NAME[,node=N][,path=bypass|dsm]`,
/// `--net switch=NAME|PATH[,mac=ADDRESS][,node=N][,path=bypass|dsm]` or
/// `--net user[,forward=HOSTPORT:GUESTPORT]…[,loopback][,node=N][,path=bypass|dsm]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetArg {
    /// A tap device of the host.
    Tap { name: String, place: PlaceArg },
    /// A network in user space.
    User {
        /// Ways in: host port, guest port.
        forwards: Vec<(u16, u16)>,
        /// The gateway is this host's loopback.
        loopback: bool,
        place: PlaceArg,
    },
    /// At a `weft switch`.
    Switch {
        socket: SwitchSocket,
        /// The card's address; without it, any.
        mac: Option<[u8; 6]>,
        place: PlaceArg,
    },
}

/// `node=N`, `path=bypass|dsm` of a network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlaceArg {
    /// Which node has it.
    pub node: u32,
    /// How its frames reach the vCPUs of other nodes.
    pub data_path: DataPath,
}

/// `--console stdio` or `--console socket=PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConsoleArg {
    /// Standard input and output.
    Stdio,
    /// A UNIX socket; in the run directory when no path is given.
    Socket(Option<PathBuf>),
}

/// `--follow`.
pub fn parse_follow(text: &str) -> Result<Follow, OptionError> {
    match text {
        "auto" => Ok(Follow::Auto),
        "never" => Ok(Follow::Never),
        count => match count.parse() {
            Ok(count @ 1..=FOLLOW_FAULTS_MAX) => Ok(Follow::Faults(count)),
            _ => Err(OptionError::Follow),
        },
    }
}

/// `--cpus N[,N…]`.
pub fn parse_cpus(text: &str) -> Result<ListArg<u32>, OptionError> {
    list(text, |value| {
        let number = value.parse();
        number.map_err(|_| OptionError::Vcpus(value.to_owned()))
    })
}

/// `--memory SIZE[,SIZE…]`.
pub fn parse_memory(text: &str) -> Result<ListArg<u64>, OptionError> {
    list(text, |value| Ok(parse_size(value)?))
}

/// `--on HOST[=SIZE]`.
pub fn parse_lender(text: &str) -> Result<(String, Option<u64>), OptionError> {
    let (host, size) = match text.split_once('=') {
        Some((host, size)) => (host, Some(parse_size(size)?)),
        None => (text, None),
    };
    match host.is_empty() {
        true => Err(OptionError::NoHost),
        false => Ok((host.to_owned(), size)),
    }
}

/// A destination of `weft vm migrate`: `HOST[=SIZE]`, or the number of a node, `NODE[=SIZE]`.
pub fn parse_destination(text: &str) -> Result<Destination, OptionError> {
    if let Ok(node) = text.parse() {
        return Ok(Destination::Node(node));
    }
    let (name, memory_bytes) = parse_lender(text)?;
    Ok(match (name.parse(), memory_bytes) {
        (Ok(node), Some(memory_bytes)) => Destination::Part { node, memory_bytes },
        _ => Destination::Host { name, memory_bytes },
    })
}

fn list<T>(
    text: &str,
    parse: impl Fn(&str) -> Result<T, OptionError>,
) -> Result<ListArg<T>, OptionError> {
    Ok(ListArg {
        text: text.to_owned(),
        values: text.split(',').map(parse).collect::<Result<_, _>>()?,
    })
}

impl FromStr for DiskArg {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<DiskArg, OptionError> {
        let (path, options) = split(text);
        if path.is_empty() {
            return Err(OptionError::NoImage);
        }
        let mut disk = DiskArg {
            path: path.into(),
            read_only: false,
            direct: false,
            node: 0,
            data_path: DataPath::default(),
        };
        for option in options {
            match option.split_once('=') {
                None if option == "ro" => disk.read_only = true,
                None if option == "direct" => disk.direct = true,
                Some(("node", node)) => disk.node = parse_node(node)?,
                Some(("path", path)) => disk.data_path = parse_path(path)?,
                _ => return Err(unknown(option, "a disk", &DISK_OPTIONS)),
            }
        }
        Ok(disk)
    }
}

impl FromStr for NetArg {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<NetArg, OptionError> {
        let (kind, options) = split(text);
        match kind.split_once('=') {
            Some(("tap", "")) => Err(OptionError::NoTapName),
            Some(("tap", name)) => {
                let mut place = PlaceArg::default();
                for option in options {
                    if !place.read(option)? {
                        return Err(unknown(option, "a tap", &PLACE_OPTIONS));
                    }
                }
                let name = name.to_owned();
                Ok(NetArg::Tap { name, place })
            }
            None if kind == "user" => {
                let (mut forwards, mut loopback) = (Vec::new(), false);
                let mut place = PlaceArg::default();
                for option in options {
                    match option {
                        "loopback" => loopback = true,
                        _ if place.read(option)? => {}
                        _ => forwards.push(parse_forward(option)?),
                    }
                }
                Ok(NetArg::User {
                    forwards,
                    loopback,
                    place,
                })
            }
            Some(("switch", "")) => Err(OptionError::NoSwitch),
            Some(("switch", socket)) => {
                let (mut mac, mut place) = (None, PlaceArg::default());
                for option in options {
                    match option.strip_prefix("mac=") {
                        Some(address) => mac = Some(parse_mac(address)?),
                        None if place.read(option)? => {}
                        None => {
                            let [node, path] = PLACE_OPTIONS;
                            return Err(unknown(option, "a switch", &["mac=ADDRESS", node, path]));
                        }
                    }
                }
                let socket = SwitchSocket::from(PathBuf::from(socket));
                Ok(NetArg::Switch { socket, mac, place })
            }
            None if kind == "tap" => Err(OptionError::NoTap),
            None if kind == "switch" => Err(OptionError::NoSwitch),
            _ => {
                let known = ["tap=NAME", "user", "switch=NAME"];
                Err(unknown(kind, "a network", &known))
            }
        }
    }
}

/// Six numbers of two hexadecimal digits; not a group's, and not zero.
fn parse_mac(text: &str) -> Result<[u8; 6], OptionError> {
    let digits = |part: &str| match part.len() {
        2 => u8::from_str_radix(part, 16).ok(),
        _ => None,
    };
    let bytes: Option<Vec<u8>> = text.split(':').map(digits).collect();
    let address = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    address
        .filter(|address| address[0] & 1 == 0 && *address != [0; 6])
        .ok_or_else(|| OptionError::Mac(text.to_owned()))
}

fn parse_node(number: &str) -> Result<u32, OptionError> {
    let parsed = number.parse();
    parsed.map_err(|_| OptionError::Node(number.to_owned()))
}

fn parse_path(path: &str) -> Result<DataPath, OptionError> {
    match path {
        "bypass" => Ok(DataPath::Bypass),
        "dsm" => Ok(DataPath::Dsm),
        _ => Err(OptionError::Path(path.to_owned())),
    }
}

impl PlaceArg {
    /// Whether it is one of its options.
    fn read(&mut self, option: &str) -> Result<bool, OptionError> {
        match option.split_once('=') {
            Some(("node", number)) => self.node = parse_node(number)?,
            Some(("path", path)) => self.data_path = parse_path(path)?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn parse_forward(option: &str) -> Result<(u16, u16), OptionError> {
    let Some(("forward", ports)) = option.split_once('=') else {
        let [node, path] = PLACE_OPTIONS;
        let known = ["forward=HOSTPORT:GUESTPORT", "loopback", node, path];
        return Err(unknown(option, "a user-mode network", &known));
    };
    let port = |text: &str| match text.parse::<u16>() {
        Ok(0) | Err(_) => Err(OptionError::Port {
            port: text.to_owned(),
            option: option.to_owned(),
        }),
        Ok(port) => Ok(port),
    };
    match ports.split_once(':') {
        Some((host, guest)) => Ok((port(host)?, port(guest)?)),
        None => Err(OptionError::NoPort(option.to_owned())),
    }
}

impl FromStr for ConsoleArg {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<ConsoleArg, OptionError> {
        match (text, text.strip_prefix("socket=")) {
            ("stdio", _) => Ok(ConsoleArg::Stdio),
            ("socket", _) => Ok(ConsoleArg::Socket(None)),
            (_, Some("")) => Err(OptionError::NoSocket),
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
fn unknown(option: &str, what: &'static str, known: &[&str]) -> OptionError {
    let word = |option: &str| option.split('=').next().unwrap_or_default().to_owned();
    let likeness = |known: &str| strsim::jaro_winkler(&word(option), &word(known));
    let nearest = known
        .iter()
        .map(|known| (likeness(known), *known))
        .filter(|(likeness, _)| *likeness >= LIKENESS_MIN)
        .max_by(|(one, _), (other, _)| one.total_cmp(other));
    let advice = match (nearest, known) {
        (Some((_, nearest)), _) => format!("did you mean `{nearest}`?"),
        (None, []) => "it has no options".to_owned(),
        (None, known) => format!("its options are {}", known.join(", ")),
    };
    OptionError::Unknown {
        what,
        option: option.to_owned(),
        advice,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error<T: FromStr<Err = OptionError> + std::fmt::Debug>(text: &str) -> String {
        text.parse::<T>().unwrap_err().to_string()
    }

    #[test]
    fn disks() {
        let disk: DiskArg = "a/b.img,direct,ro".parse().unwrap();
        assert_eq!(disk.path, PathBuf::from("a/b.img"));
        assert!(disk.read_only && disk.direct);
        assert!(!"x".parse::<DiskArg>().unwrap().read_only);
        assert_eq!("x,node=2,ro".parse::<DiskArg>().unwrap().node, 2);
        let slow: DiskArg = "x,path=dsm".parse().unwrap();
        assert_eq!(slow.data_path, DataPath::Dsm);
        assert_eq!(disk.data_path, DataPath::Bypass);
        assert!(error::<DiskArg>("x,path=fast").contains("bypass or dsm"));
        assert!(error::<DiskArg>("x,node=").contains("is not a node's number"));
        assert!(error::<DiskArg>(",ro").contains("lacks"));
        assert_eq!(
            error::<DiskArg>("x,dierct"),
            "a disk has no option `dierct`: did you mean `direct`?"
        );
        assert!(error::<DiskArg>("x,").contains("its options are ro, direct"));
    }

    #[test]
    fn networks() {
        let tap = |node, data_path| {
            let name = "t0".into();
            let place = PlaceArg { node, data_path };
            Ok(NetArg::Tap { name, place })
        };
        assert_eq!("tap=t0".parse(), tap(0, DataPath::Bypass));
        assert_eq!("tap=t0,node=3".parse(), tap(3, DataPath::Bypass));
        let user = |forwards, loopback| {
            Ok(NetArg::User {
                forwards,
                loopback,
                place: PlaceArg::default(),
            })
        };
        assert_eq!("user".parse(), user(vec![], false));
        let two = "user,forward=2222:22,loopback,forward=8080:80".parse();
        assert_eq!(two, user(vec![(2222, 22), (8080, 80)], true));
        let Ok(NetArg::User { place, .. }) = "user,node=1,forward=1:2,path=dsm".parse() else {
            panic!("no network in user space");
        };
        assert_eq!((place.node, place.data_path), (1, DataPath::Dsm));
        assert!(error::<NetArg>("tap=t0,nod=3").contains("did you mean `node=N`?"));
        assert!(
            error::<NetArg>("user,node=-1").contains("`-1` in `node=-1` is not a node's number")
        );
        assert_eq!("tap=t0,path=dsm".parse(), tap(0, DataPath::Dsm));
        assert_eq!(
            "tap=t0,path=bypass,node=1".parse(),
            tap(1, DataPath::Bypass)
        );
        assert!(error::<NetArg>("user,path=fast").contains("bypass or dsm"));
        assert!(error::<NetArg>("tap=t0,pth=dsm").contains("did you mean `path=bypass|dsm`?"));
        assert!(error::<NetArg>("tap").contains("tap=NAME"));
        assert!(error::<NetArg>("tap=").contains("lacks"));
        let switch = |socket: &str, mac, node| {
            let socket = PathBuf::from(socket).into();
            let data_path = DataPath::default();
            let place = PlaceArg { node, data_path };
            Ok(NetArg::Switch { socket, mac, place })
        };
        assert_eq!("switch=/r/s".parse(), switch("/r/s", None, 0));
        assert_eq!(
            "switch=s,node=1,mac=02:00:00:00:fa:01".parse(),
            switch("s", Some([2, 0, 0, 0, 0xfa, 1]), 1)
        );
        for wrong in [
            "",
            "1",
            "02:00:00:00:00",
            "03:00:00:00:00:01",
            "2:0:0:0:0:1",
        ] {
            let error = error::<NetArg>(&format!("switch=s,mac={wrong}"));
            assert!(error.contains("is not a card's address"), "{error}");
        }
        assert!(error::<NetArg>("switch").contains("switch=NAME"));
        assert!(error::<NetArg>("switch=").contains("switch=NAME"));
        assert!(error::<NetArg>("switch=s,mad=1").contains("did you mean `mac=ADDRESS`?"));
        assert!(error::<NetArg>("usr").contains("did you mean `user`?"));
        assert!(error::<NetArg>("user,foward=1:2").contains("did you mean `forward="));
        assert!(error::<NetArg>("user,lopback").contains("did you mean `loopback`?"));
        assert!(error::<NetArg>("user,forward=0:22").contains("`0` in `forward=0:22`"));
        assert!(error::<NetArg>("user,forward=1:70000").contains("`70000`"));
        assert!(error::<NetArg>("user,forward=22").contains("HOSTPORT:GUESTPORT"));
    }

    #[test]
    fn vcpus_follow_as_they_are_told() {
        assert_eq!(parse_follow("auto"), Ok(Follow::Auto));
        assert_eq!(parse_follow("never"), Ok(Follow::Never));
        assert_eq!(parse_follow("32"), Ok(Follow::Faults(32)));
        for wrong in ["0", "4194305", "always", "-1", ""] {
            let error = parse_follow(wrong).unwrap_err().to_string();
            assert!(error.ends_with("from 1 to 4194304"), "{wrong}: {error}");
        }
    }

    #[test]
    fn lists() {
        let cpus = parse_cpus("1,0,2").unwrap();
        assert_eq!((cpus.text.as_str(), cpus.values), ("1,0,2", vec![1, 0, 2]));
        assert_eq!(parse_memory("64M,1G").unwrap().values, [64 << 20, 1 << 30]);
        let error = parse_cpus("1,").unwrap_err().to_string();
        assert_eq!(error, "`` is not a number of vCPUs");
        assert!(
            parse_memory("1G,x")
                .unwrap_err()
                .to_string()
                .contains("`x` is not a size")
        );
    }

    #[test]
    fn lenders() {
        assert_eq!(parse_lender("h:7117"), Ok(("h:7117".into(), None)));
        assert_eq!(parse_lender("h=2M"), Ok(("h".into(), Some(2 << 20))));
        assert_eq!(parse_lender("=2M"), Err(OptionError::NoHost));
        assert!(matches!(parse_lender("h="), Err(OptionError::Size(_))));
    }

    #[test]
    fn destinations() {
        let host = |name: &str, memory_bytes| {
            let name = name.to_owned();
            Some(Destination::Host { name, memory_bytes })
        };
        let parsed = |text| parse_destination(text).ok();
        assert_eq!(parsed("2"), Some(Destination::Node(2)));
        let (node, memory_bytes) = (12, 3 << 20);
        assert_eq!(
            parsed("12=3M"),
            Some(Destination::Part { node, memory_bytes })
        );
        assert_eq!(parsed("alpha"), host("alpha", None));
        assert_eq!(parsed("alpha=4G"), host("alpha", Some(4 << 30)));
        assert_eq!(parsed("2nd"), host("2nd", None));
        assert!(parsed("").is_none() && parsed("=4G").is_none() && parsed("a=b").is_none());
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
