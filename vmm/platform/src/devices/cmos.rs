//! The CMOS clock (MC146818 data sheet) and its memory: shows the wall clock, so
//! that a guest has the date from the start. It neither interrupts nor can be
//! set: what a guest writes to the time is not kept.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::clock::Clock;
use crate::part::{Part, PartError, Persist, Version};
use weft_confine::lock;

/// Index (written), data.
pub const PORTS: Range<u64> = 0x70..0x72;

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const WEEKDAY: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const REGISTER_A: u8 = 0x0a;
const REGISTER_B: u8 = 0x0b;
const REGISTER_C: u8 = 0x0c;
const REGISTER_D: u8 = 0x0d;
const CENTURY: u8 = 0x32;
/// Time base of 32768 Hz, rate of 1024 Hz; no update in progress.
const A_RESET: u8 = 0x26;
/// 24 hours, packed decimal.
const B_RESET: u8 = 0x02;
const B_BINARY: u8 = 0x04;
const B_24_HOURS: u8 = 0x02;
/// Time and memory are valid.
const D_VALID: u8 = 0x80;
const AFTERNOON: u8 = 0x80;
const REGISTERS: usize = 128;

/// Registers and memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CmosState {
    version: Version<1>,
    selected: u8,
    /// Always [`REGISTERS`] long.
    memory: Vec<u8>,
}

pub struct CmosClock {
    state: Mutex<CmosState>,
    clock: Arc<Clock>,
}

impl CmosClock {
    /// Shows `clock`'s wall time, in UTC.
    pub fn new(clock: Arc<Clock>) -> Self {
        let mut memory = vec![0; REGISTERS];
        memory[usize::from(REGISTER_A)] = A_RESET;
        memory[usize::from(REGISTER_B)] = B_RESET;
        let selected = 0;
        Self {
            state: Mutex::new(CmosState {
                version: Version,
                selected,
                memory,
            }),
            clock,
        }
    }

    fn register(&self, index: u8) -> u8 {
        let state = lock(&self.state);
        let memory = |index: u8| state.memory.get(usize::from(index)).copied().unwrap_or(0);
        let control = memory(REGISTER_B);
        let date = || Date::at(self.clock.wall());
        let value = match index {
            SECONDS => date().second,
            MINUTES => date().minute,
            HOURS => return hours(date().hour, control),
            WEEKDAY => date().weekday,
            DAY => date().day,
            MONTH => date().month,
            YEAR => (date().year % 100) as u8,
            CENTURY => (date().year / 100) as u8,
            REGISTER_C => return 0,
            REGISTER_D => return D_VALID,
            _ => return memory(index),
        };
        encode(value, control)
    }
}

fn encode(value: u8, control: u8) -> u8 {
    if control & B_BINARY != 0 {
        value
    } else {
        ((value / 10) << 4) | (value % 10)
    }
}

fn hours(hour: u8, control: u8) -> u8 {
    if control & B_24_HOURS != 0 {
        return encode(hour, control);
    }
    let half = if hour >= 12 { AFTERNOON } else { 0 };
    encode((hour + 11) % 12 + 1, control) | half
}

/// A moment in the Gregorian calendar.
#[derive(Debug, PartialEq, Eq)]
struct Date {
    year: u32,
    month: u8,
    day: u8,
    /// 1 is Sunday.
    weekday: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

impl Date {
    /// That long after 1970 began. The calendar repeats every 400 years, which
    /// are taken to begin with March, so that leap days come last.
    fn at(since: Duration) -> Self {
        const DAYS_400_YEARS: u64 = 146_097;
        let seconds = since.as_secs();
        let days = seconds / 86_400;
        // From 1 March 0000 to 1 January 1970.
        let shifted = days + 719_468;
        let era = shifted / DAYS_400_YEARS;
        let day_of_era = shifted % DAYS_400_YEARS;
        let leap_days = day_of_era / 1460 + day_of_era / 146_096;
        let year_of_era = (day_of_era + day_of_era / 36_524 - leap_days) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let month = (month_from_march + 2) % 12 + 1;
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        Self {
            year: year as u32,
            month: month as u8,
            day: (day_of_year - (153 * month_from_march + 2) / 5 + 1) as u8,
            // 1 January 1970 was a Thursday.
            weekday: ((days + 4) % 7 + 1) as u8,
            hour: (seconds / 3600 % 24) as u8,
            minute: (seconds / 60 % 60) as u8,
            second: (seconds % 60) as u8,
        }
    }
}

impl BusDevice for CmosClock {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let ([byte], 1) = (data, offset) {
            let selected = lock(&self.state).selected;
            *byte = self.register(selected);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let [byte] = data else { return };
        let mut state = lock(&self.state);
        if offset == 0 {
            // Bit 7 masks NMIs on old PCs.
            state.selected = byte & 0x7f;
            return;
        }
        let selected = state.selected;
        if let Some(cell) = state.memory.get_mut(usize::from(selected)) {
            *cell = *byte;
        }
    }
}

impl Part for CmosClock {}

impl Persist for CmosClock {
    type State = CmosState;

    fn save(&self) -> Result<CmosState, PartError> {
        Ok(lock(&self.state).clone())
    }

    fn restore(&self, state: &CmosState) -> Result<(), PartError> {
        if state.memory.len() != REGISTERS {
            let what = format!("a CMOS of {} bytes", state.memory.len());
            return Err(PartError::Misfit(what));
        }
        *lock(&self.state) = state.clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Source;

    fn rig() -> CmosClock {
        CmosClock::new(Arc::new(Clock::new(Source::Counted, 0)))
    }

    fn read(cmos: &CmosClock, index: u8) -> u8 {
        cmos.write(0, &[index]);
        let mut data = [0];
        cmos.read(1, &mut data);
        data[0]
    }

    fn date(seconds: u64) -> (u32, u8, u8, u8) {
        let date = Date::at(Duration::from_secs(seconds));
        (date.year, date.month, date.day, date.weekday)
    }

    #[test]
    fn the_calendar_is_right() {
        assert_eq!(date(0), (1970, 1, 1, 5));
        assert_eq!(date(951_782_400), (2000, 2, 29, 3));
        assert_eq!(date(951_868_800), (2000, 3, 1, 4));
        assert_eq!(date(1_767_225_599), (2025, 12, 31, 4));
        assert_eq!(date(4_107_542_400), (2100, 3, 1, 2));
        let date = Date::at(Duration::from_secs(86_399));
        assert_eq!((date.hour, date.minute, date.second), (23, 59, 59));
    }

    #[test]
    fn the_time_is_shown_in_packed_decimal_and_in_binary() {
        let cmos = rig();
        cmos.clock
            .set_counted(((13 * 60 + 45) * 60 + 30) * 1_000_000_000);
        let time = |cmos: &CmosClock| {
            [CENTURY, YEAR, MONTH, DAY, HOURS, MINUTES, SECONDS].map(|index| read(cmos, index))
        };
        assert_eq!(time(&cmos), [0x20, 0x26, 1, 1, 0x13, 0x45, 0x30]);
        assert_eq!(read(&cmos, WEEKDAY), 5);
        cmos.write(0, &[REGISTER_B]);
        cmos.write(1, &[B_BINARY]);
        assert_eq!(time(&cmos), [20, 26, 1, 1, 1 | AFTERNOON, 45, 30]);
    }

    #[test]
    fn its_memory_is_kept_and_goes_elsewhere() {
        let cmos = rig();
        cmos.write(0, &[0x55 | 0x80]);
        cmos.write(1, &[0xaa]);
        let state = Persist::save(&cmos).unwrap();
        let other = rig();
        Persist::restore(&other, &state).unwrap();
        assert_eq!(read(&other, 0x55), 0xaa);
        assert_eq!(read(&other, REGISTER_D), D_VALID);
        let short = CmosState {
            memory: Vec::new(),
            ..state
        };
        assert!(Persist::restore(&other, &short).is_err());
        for index in 0..=255 {
            other.write(0, &[index]);
            other.write(1, &[0xff, 0xff]);
            other.read(1, &mut [0; 4]);
            read(&other, index);
        }
    }
}
