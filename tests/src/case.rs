//! One case of the corpus: a command, its inputs, what it leaves.

use std::path::Path;
use std::time::Duration;

use crate::context::Context;

/// The part of a program's memory that home may hold, unless the case says
/// otherwise.
const HOME_PERCENT: u64 = 35;

/// What a case needs beyond the shell; without it the case is skipped.
#[derive(Debug, Clone)]
pub enum Need {
    /// A program in `PATH`.
    Tool(&'static str),
    /// A program of the corpus; missing when its compiler was.
    Program(&'static str),
}

/// A case. The command is run natively and under `weft` in fresh directories
/// that hold the same inputs.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name, for the command line and the report.
    pub name: String,
    /// Program and arguments. A first word without a slash is looked up in
    /// `PATH`; `{programs}`, `{sources}` and `{inputs}` are replaced.
    pub command: Vec<String>,
    /// Standard input, from the inputs.
    pub stdin: Option<String>,
    /// Standard input, from the prepared directory.
    pub script: Option<String>,
    /// A shell script that prepares the directory before the run.
    pub prepare: Option<String>,
    /// Files in the directory whose bytes must be the same.
    pub outputs: Vec<String>,
    /// What must be there.
    pub needs: Vec<Need>,
    /// What the program's first process needs in all.
    pub footprint_mib: u64,
    /// The part of it that home may hold.
    pub home_percent: u64,
    /// At least this many pages must be pushed.
    pub pushes_min: u64,
    /// Whether the execution must jump when the policy is a count.
    pub must_jump: bool,
    /// After this a run under `weft` counts as hung.
    pub bound: Duration,
    /// Only run when named, or in the long run.
    pub long: bool,
}

impl Case {
    /// A case with the given command, split at spaces.
    pub fn new(name: &str, command: &str) -> Case {
        Case {
            name: name.to_string(),
            command: command.split(' ').map(str::to_string).collect(),
            stdin: None,
            script: None,
            prepare: None,
            outputs: Vec::new(),
            needs: Vec::new(),
            footprint_mib: 16,
            home_percent: HOME_PERCENT,
            pushes_min: 0,
            must_jump: false,
            bound: Duration::from_secs(120),
            long: false,
        }
    }

    /// Reads standard input from an input file.
    pub fn stdin(mut self, input: &str) -> Case {
        self.stdin = Some(input.to_string());
        self
    }

    /// Reads standard input from a file that was prepared.
    pub fn script(mut self, name: &str) -> Case {
        self.script = Some(name.to_string());
        self
    }

    /// Prepares the directory by a shell script.
    pub fn prepare(mut self, script: &str) -> Case {
        self.prepare = Some(script.to_string());
        self
    }

    /// Names an output file.
    pub fn output(mut self, name: &str) -> Case {
        self.outputs.push(name.to_string());
        self
    }

    /// Needs a tool in `PATH`.
    pub fn tool(mut self, name: &'static str) -> Case {
        self.needs.push(Need::Tool(name));
        self
    }

    /// Needs a program of the corpus.
    pub fn program(mut self, name: &'static str) -> Case {
        self.needs.push(Need::Program(name));
        self
    }

    /// Says how much memory it needs, and how many pushes that must force.
    pub fn memory(mut self, footprint_mib: u64, pushes_min: u64) -> Case {
        self.footprint_mib = footprint_mib;
        self.pushes_min = pushes_min;
        self
    }

    /// Lets home hold more than usual. For a program that goes back and forth
    /// over all of its memory: with a third of it at home nearly every access
    /// would be remote, and the run would be one of minutes.
    pub fn home(mut self, percent: u64) -> Case {
        self.home_percent = percent;
        self
    }

    /// Demands a jump when the policy is a count.
    pub fn jumps(mut self) -> Case {
        self.must_jump = true;
        self
    }

    /// Leaves it to the long run.
    pub fn long(mut self) -> Case {
        self.long = true;
        self.bound = Duration::from_secs(900);
        self
    }

    /// The command with its places filled in.
    pub fn words(&self, context: &Context) -> Vec<String> {
        self.command.iter().map(|word| context.fill(word)).collect()
    }

    /// Why it cannot run here, if so.
    pub fn missing(&self, context: &Context) -> Option<String> {
        self.needs.iter().find_map(|need| match need {
            Need::Tool(name) if context.tool(name).is_none() => {
                Some(format!("`{name}` is not installed (`make setup`)"))
            }
            Need::Program(name) if !context.programs.join(name).exists() => Some(format!(
                "program `{name}` was not built (`make setup` and `make programs`)"
            )),
            _ => None,
        })
    }

    /// The paths of its outputs in a directory.
    pub fn outputs_in<'a>(
        &'a self,
        directory: &'a Path,
    ) -> impl Iterator<Item = (&'a str, std::path::PathBuf)> {
        self.outputs
            .iter()
            .map(|name| (name.as_str(), directory.join(name)))
    }
}
