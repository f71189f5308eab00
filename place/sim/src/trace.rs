//! What is asked of the cluster: read from a trace, or made from published distributions.

use crate::random::Random;
use flate2::read::MultiGzDecoder;
use serde::Deserialize;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;
use weft_place::Room;

/// One aggregate that is asked for.
#[derive(Clone, Debug)]
pub struct Job {
    pub arrival: Duration,
    pub room: Room,
    /// How long it runs once it was placed. `None`: until after the end of the trace.
    pub lifetime: Option<Duration>,
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot open the trace {}: {error}", .path.display())]
    Open {
        path: PathBuf,
        error: std::io::Error,
    },
    #[error(
        "line {line} of the trace {}: {what}; its columns are arrival_s, batch, cores, memory_gb, \
         lifetime_min_s, lifetime_max_s, ended", .path.display()
    )]
    Line {
        path: PathBuf,
        line: u64,
        what: String,
    },
    #[error("the trace {} has no line: give one with aggregates in it", .0.display())]
    Empty(PathBuf),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    arrival_s: f64,
    #[serde(rename = "batch")]
    _batch: u64,
    cores: u32,
    memory_gb: f64,
    lifetime_min_s: f64,
    lifetime_max_s: f64,
    ended: u8,
}

/// Reads a trace, compressed by gzip or not, in the order of arrival. Where it knows a
/// lifetime by its bounds only, `seed` chooses a time between them. The first arrival is
/// at 0.
pub fn read(path: &Path, seed: u64) -> Result<Vec<Job>, TraceError> {
    let open = |error| TraceError::Open {
        path: path.into(),
        error,
    };
    let mut file = File::open(path).map_err(open)?;
    let mut magic = [0; 2];
    let read = file.read(&mut magic).map_err(open)?;
    let file = File::open(path).map_err(open)?;
    let text: Box<dyn Read> = match magic {
        [0x1f, 0x8b] if read == 2 => Box::new(MultiGzDecoder::new(file)),
        _ => Box::new(file),
    };
    parse(text, path, seed)
}

fn parse(text: impl Read, path: &Path, seed: u64) -> Result<Vec<Job>, TraceError> {
    let mut random = Random::new(seed);
    let mut reader = csv::Reader::from_reader(text);
    let mut jobs = Vec::new();
    for (number, line) in reader.deserialize::<Line>().enumerate() {
        let wrong = |what: String| TraceError::Line {
            path: path.into(),
            line: number as u64 + 2,
            what,
        };
        let line = line.map_err(|error| wrong(error.to_string()))?;
        jobs.push(job(&line, &mut random).map_err(|what| wrong(what.into()))?);
    }
    jobs.sort_by_key(|job| job.arrival);
    let first = jobs
        .first()
        .ok_or_else(|| TraceError::Empty(path.into()))?
        .arrival;
    for job in &mut jobs {
        job.arrival -= first;
    }
    Ok(jobs)
}

/// A year in seconds: no time in a trace is longer.
const TIME_MAX_S: f64 = 366.0 * 86400.0;

fn job(line: &Line, random: &mut Random) -> Result<Job, &'static str> {
    let seconds = |value: f64| match value {
        value if (0.0..=TIME_MAX_S).contains(&value) => Ok(Duration::from_secs_f64(value)),
        _ => Err("a time is not between 0 and a year"),
    };
    if line.cores == 0 || line.cores > 1 << 16 {
        return Err("cores are not between 1 and 65536");
    }
    if !(line.memory_gb > 0.0 && line.memory_gb <= 1e6) {
        return Err("memory_gb is not between 0 and a million");
    }
    let arrival = seconds(line.arrival_s)?;
    let (min, max) = (seconds(line.lifetime_min_s)?, seconds(line.lifetime_max_s)?);
    if max < min {
        return Err("lifetime_max_s is less than lifetime_min_s");
    }
    let chosen = min + (max - min).mul_f64(random.fraction());
    let lifetime = match line.ended {
        0 => None,
        1 => Some(chosen),
        _ => return Err("ended is neither 0 nor 1"),
    };
    let room = Room::new(line.cores, (line.memory_gb * 1024.0).ceil() as u64);
    Ok(Job {
        arrival,
        room,
        lifetime,
    })
}

/// A size, how often it is asked for, and how long its machines live.
struct Size {
    room: Room,
    share: f64,
    /// Tenths of the distribution, in seconds.
    life_s: [f64; 11],
}

const fn size(cores: u32, memory_mib: u64, share: f64, life_s: [f64; 11]) -> Size {
    let room = Room::new(cores, memory_mib);
    Size {
        room,
        share,
        life_s,
    }
}

#[rustfmt::skip]
const LIFE_OF_1_S: [f64; 11] =
    [60.0, 450.0, 750.0, 1050.0, 1350.0, 1400.0, 1950.0, 5550.0, 18e3, 48.6e3, 475e3];
#[rustfmt::skip]
const LIFE_OF_2_S: [f64; 11] =
    [60.0, 450.0, 750.0, 1050.0, 1350.0, 1650.0, 2850.0, 5550.0, 16.2e3, 57.6e3, 475e3];
#[rustfmt::skip]
const LIFE_OF_4_S: [f64; 11] =
    [60.0, 1050.0, 1350.0, 1650.0, 1950.0, 2550.0, 3750.0, 5550.0, 18e3, 63e3, 475e3];
#[rustfmt::skip]
const LIFE_OF_8_S: [f64; 11] =
    [60.0, 750.0, 1350.0, 1950.0, 5550.0, 5600.0, 9000.0, 12.6e3, 27e3, 52.2e3, 475e3];

/// From Azure's public dataset V1 of 2017 (E. Cortez and others, Resource Central, SOSP 2017;
/// CC BY 4.0, Microsoft), of 410,276 machines that arrived in 5.7 days. Machines that outlived
/// them count with what they had lived. 16 cores (18 machines) are left out.
const SIZES: [Size; 5] = [
    size(1, 1792, 0.561, LIFE_OF_1_S),
    size(2, 3584, 0.202, LIFE_OF_2_S),
    size(4, 7168, 0.102, LIFE_OF_4_S),
    size(8, 14336, 0.098, LIFE_OF_8_S),
    size(8, 57344, 0.037, LIFE_OF_8_S),
];

/// A made trace: bursts of `burst` arrivals, each spread over a tenth of the time between
/// bursts.
#[derive(Clone, Copy, Debug)]
pub struct Made {
    pub bursts: u32,
    pub burst: u32,
    pub between: Duration,
    /// Lifetimes are divided by this.
    pub faster: f64,
    /// Sizes that no host holds are left out.
    pub largest: Room,
}

/// Whether a made trace has a machine for hosts with this room.
pub fn some_size_fits(room: Room) -> bool {
    SIZES.iter().any(|size| room.holds(size.room))
}

pub fn make(made: Made, seed: u64) -> Vec<Job> {
    let mut random = Random::new(seed);
    let fitting = SIZES.iter().filter(|size| made.largest.holds(size.room));
    let sizes: Vec<&Size> = fitting.collect();
    let all: f64 = sizes.iter().map(|size| size.share).sum();
    let mut jobs = Vec::new();
    for burst in 0..made.bursts {
        let start = made.between * burst;
        for _ in 0..made.burst {
            let mut point = random.fraction() * all;
            let size = sizes.iter().find(|size| {
                point -= size.share;
                point < 0.0
            });
            let size = size.unwrap_or(&sizes[0]);
            let place = random.fraction() * 10.0;
            let tenth = place as usize;
            let (low, high) = (size.life_s[tenth], size.life_s[tenth + 1]);
            // Between two tenths the logarithm is even: the last one spans a factor of ten.
            let lifetime = low * (high / low).powf(place.fract()) / made.faster;
            jobs.push(Job {
                arrival: start + made.between.mul_f64(random.between(0.0, 0.1)),
                room: size.room,
                lifetime: Some(Duration::from_secs_f64(lifetime)),
            });
        }
    }
    jobs.sort_by_key(|job| job.arrival);
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "arrival_s,batch,cores,memory_gb,lifetime_min_s,lifetime_max_s,ended\n";

    fn parsed(lines: &str) -> Result<Vec<Job>, TraceError> {
        parse(format!("{HEAD}{lines}").as_bytes(), Path::new("t.csv"), 1)
    }

    #[test]
    fn lines_become_jobs() {
        let jobs = parsed("600,1,2,3.5,300,600,1\n300,0,1,1.75,0,300,0\n").unwrap();
        assert_eq!(jobs[0].arrival, Duration::ZERO);
        assert_eq!(jobs[0].lifetime, None);
        assert_eq!(jobs[1].room, Room::new(2, 3584));
        let lifetime = jobs[1].lifetime.unwrap().as_secs();
        assert!((300..=600).contains(&lifetime));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (lines, what) in [
            (
                "0,0,0,1,0,1,1\n",
                "line 2 of the trace t.csv: cores are not",
            ),
            (
                "0,0,1,1,0,1,1\n0,0,1,NaN,0,1,1\n",
                "line 3 of the trace t.csv: memory_gb",
            ),
            ("0,0,1,1,5,1,1\n", "lifetime_max_s is less"),
            ("0,0,1,1,0,1,7\n", "ended is neither"),
            ("-1,0,1,1,0,1,1\n", "a time is not"),
            ("inf,0,1,1,0,1,1\n", "a time is not"),
            ("x,0,1,1,0,1,1\n", "line 2"),
            ("0,0,1\n", "line 2"),
            ("", "has no line"),
        ] {
            let error = parsed(lines).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        assert!(
            read(Path::new("/nonexistent"), 1)
                .unwrap_err()
                .to_string()
                .contains("open")
        );
    }

    #[test]
    fn made_traces_repeat_and_fit() {
        let made = Made {
            bursts: 3,
            burst: 100,
            between: Duration::from_secs(1000),
            faster: 100.0,
            largest: Room::new(12, 48 * 1024),
        };
        let jobs = make(made, 7);
        assert_eq!(jobs.len(), 300);
        assert!(jobs.iter().all(|job| made.largest.holds(job.room)));
        let again = make(made, 7);
        assert!(
            jobs.iter()
                .zip(&again)
                .all(|(a, b)| a.arrival == b.arrival && a.room == b.room)
        );
    }
}
