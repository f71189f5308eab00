//! Amounts of memory as people write them: `64M`, `1.5G`, `4096K`, `1GiB`.
//! Units are binary throughout; a bare number is bytes.

/// Bytes of one page of the program.
pub const PAGE_BYTES: u64 = 4096;

/// Why a text is not an amount of memory.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum SizeError {
    /// Nothing, or no digits, before the unit.
    #[error("`{0}` is not a size: write a number and a unit, such as 64M or 1.5G")]
    NotANumber(String),
    /// The letters after the number mean nothing.
    #[error("`{unit}` in `{text}` is not a unit of size: use K, M, G or T (powers of 1024)")]
    UnknownUnit {
        /// The letters.
        unit: String,
        /// The whole text.
        text: String,
    },
    /// Beyond what a 64-bit address can name.
    #[error("`{0}` is larger than the address space")]
    TooLarge(String),
}

/// Reads an amount of memory, in bytes.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let trimmed = text.trim();
    let end = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    let value: f64 = number
        .parse()
        .map_err(|_| SizeError::NotANumber(text.to_owned()))?;
    let shift = shift_of(unit.trim()).ok_or_else(|| SizeError::UnknownUnit {
        unit: unit.trim().to_owned(),
        text: text.to_owned(),
    })?;
    // Whole numbers stay exact: a double has only 53 bits.
    let bytes = match number.parse::<u64>() {
        Ok(whole) => whole
            .checked_mul(1 << shift)
            .ok_or_else(|| SizeError::TooLarge(text.to_owned()))?,
        Err(_) => {
            let bytes = value * (1u64 << shift) as f64;
            if bytes >= u64::MAX as f64 {
                return Err(SizeError::TooLarge(text.to_owned()));
            }
            bytes as u64
        }
    };
    Ok(bytes)
}

fn shift_of(unit: &str) -> Option<u32> {
    match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kb" | "kib" => Some(10),
        "m" | "mb" | "mib" => Some(20),
        "g" | "gb" | "gib" => Some(30),
        "t" | "tb" | "tib" => Some(40),
        _ => None,
    }
}

/// Writes an amount of memory in the largest unit that leaves at least 1:
/// `512 B`, `64.0 MiB`, `1.5 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (name, shift) in UNITS {
        if bytes >= 1 << shift {
            return format!("{:.1} {name}", bytes as f64 / (1u64 << shift) as f64);
        }
    }
    format!("{bytes} B")
}

/// The same for a number of pages.
pub fn format_pages(pages: u64) -> String {
    format_bytes(pages.saturating_mul(PAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("64 MiB"), Ok(64 << 20));
        assert_eq!(parse_size("1.5G"), Ok(3 << 29));
        assert_eq!(parse_size("0.5k"), Ok(512));
        assert_eq!(parse_size("1t"), Ok(1 << 40));
        assert_eq!(parse_size("18014398509481983K"), Ok(u64::MAX - 1023));
    }

    #[test]
    fn nonsense_is_named() {
        assert!(matches!(parse_size(""), Err(SizeError::NotANumber(_))));
        assert!(matches!(parse_size("M"), Err(SizeError::NotANumber(_))));
        assert!(matches!(parse_size("-1M"), Err(SizeError::NotANumber(_))));
        assert!(matches!(
            parse_size("1.2.3M"),
            Err(SizeError::NotANumber(_))
        ));
        assert_eq!(
            parse_size("64Q"),
            Err(SizeError::UnknownUnit {
                unit: "Q".into(),
                text: "64Q".into()
            })
        );
        assert!(matches!(
            parse_size("99999999T"),
            Err(SizeError::TooLarge(_))
        ));
    }

    #[test]
    fn sizes_are_written() {
        assert_eq!(format_bytes(512), "512 B");
        assert_eq!(format_bytes(64 << 20), "64.0 MiB");
        assert_eq!(format_pages(256), "1.0 MiB");
    }
}
