//! EP (NAS Parallel Benchmarks), whose result says whether all ranks worked on what they should:
//! sums that depend on its size alone. Those here are of runs whose machines never moved.

use anyhow::{Context as _, Result, ensure};

/// By the logarithm of the number of pairs.
const SUMS: [(u32, &str); 8] = [
    (24, "-3.247834652035e+03 -6.958407078383e+03"),
    (26, "2.406884086409e+02 1.262912082009e+03"),
    (28, "-4.295875165633e+03 -1.580732573679e+04"),
    (29, "9.860856056975e+03 -3.280955456506e+04"),
    (30, "4.033815542443e+04 -2.660669192810e+04"),
    (31, "2.782108264749e+04 -1.179898204041e+04"),
    (32, "4.764367928001e+04 -8.084072988064e+04"),
    (33, "4.883770462202e+04 -6.061839087583e+04"),
];

/// Whether standard output is what EP prints with `ranks` ranks, one on each machine, and nothing else.
pub fn judge(output: &str, log_pairs: u32, ranks: u32) -> Result<()> {
    judge_on(output, log_pairs, ranks, |rank| rank)
}

/// The same, with the number of each rank's machine.
pub fn judge_on(
    output: &str,
    log_pairs: u32,
    ranks: u32,
    machine: impl Fn(u32) -> u32,
) -> Result<()> {
    let named = || format!("the output is {output:?}");
    let lines: Vec<&str> = output.lines().collect();
    ensure!(lines.len() as u32 == ranks + 1, "{}", named());
    for rank in 0..ranks {
        let line = format!("ep: rank {rank} of {ranks} on vm-{}", machine(rank));
        ensure!(
            lines.iter().filter(|said| **said == line).count() == 1,
            "{}",
            named()
        );
    }
    let last = lines.last().with_context(named)?;
    let begin = format!("ep: 2^{log_pairs} pairs on {ranks} ranks in ");
    ensure!(
        last.starts_with(&begin) && last.ends_with(": right"),
        "{}",
        named()
    );
    // It checks larger ones itself only, by what its ranks count and where each batch ends.
    if let Some((_, known)) = SUMS.iter().find(|(size, _)| *size == log_pairs) {
        let (_, rest) = last.split_once("sums ").with_context(named)?;
        let sums = rest.trim_end_matches(": right").split(' ');
        for (sum, known) in sums.zip(known.split(' ')) {
            let (sum, known): (f64, f64) = (sum.parse()?, known.parse()?);
            // Ranks add in another order if there are more of them.
            let is_near = ((sum - known) / known).abs() < 1e-9;
            ensure!(is_near, "{sum} instead of {known}: {}", named());
        }
    }
    Ok(())
}
