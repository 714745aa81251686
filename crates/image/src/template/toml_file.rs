//! The TOML form of a template: `docs/templates.md` shows all of it.

use std::collections::BTreeMap;

use dormouse_types::Shape;
use serde::Deserialize;
use toml::Spanned;

use super::dockerfile::check_owner;
use super::{
    Action, Base, Instruction, Probe, READY_TIMEOUT_S, READY_TIMEOUT_S_MAX, Ready, RunCommand, STEPS_MAX,
    Template, TemplateError, check_alias, check_user, check_variable, parse_base,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: Option<String>,
    #[serde(default)]
    aliases: Vec<String>,
    from: Spanned<String>,
    #[serde(default)]
    packages: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    workdir: Option<String>,
    user: Option<String>,
    start: Option<String>,
    ready: Option<Spanned<ReadyText>>,
    #[serde(default)]
    shape: ShapeText,
    #[serde(default)]
    steps: Vec<Spanned<StepText>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ReadyText {
    Command(String),
    Full(ReadyFull),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadyFull {
    command: Option<String>,
    port: Option<u16>,
    timeout_s: Option<u32>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct ShapeText {
    cpus: Option<u32>,
    memory_mib: Option<u32>,
    disk_mib: Option<u32>,
    processes_max: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Words {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StepText {
    run: Option<Words>,
    copy: Option<Vec<String>>,
    env: Option<BTreeMap<String, String>>,
    workdir: Option<String>,
    user: Option<String>,
    owner: Option<String>,
    mode: Option<String>,
}

pub fn parse(file: &str, text: &str) -> Result<Template, TemplateError> {
    let at = |offset: Option<usize>| offset.map(|offset| line_of(text, offset));
    let error = |offset, why| TemplateError { file: file.to_owned(), line: at(offset), why };
    let parsed: File = toml::from_str(text)
        .map_err(|found| error(found.span().map(|span| span.start), found.message().to_owned()))?;
    let start = parsed.from.span().start;
    let base = parse_base(parsed.from.get_ref()).map_err(|why| error(Some(start), why))?;
    if !parsed.packages.is_empty() && !matches!(base, Base::Debian { .. }) {
        let why = "packages need a Debian base; install them with a step: run = \"apt-get install -y …\"";
        return Err(error(None, why.to_owned()));
    }
    let aliases: Vec<String> = parsed.name.into_iter().chain(parsed.aliases).collect();
    for alias in &aliases {
        check_alias(alias).map_err(|why| error(None, why))?;
    }
    if parsed.steps.len() > STEPS_MAX {
        return Err(error(None, format!("more than {STEPS_MAX} steps")));
    }
    let base_line = line_of(text, start);
    let mut instructions = settings(base_line, parsed.env, parsed.workdir).map_err(|why| error(None, why))?;
    for spanned in parsed.steps {
        let offset = spanned.span().start;
        let line = line_of(text, offset);
        instructions.extend(step(line, spanned.into_inner()).map_err(|why| error(Some(offset), why))?);
    }
    if let Some(user) = parsed.user {
        check_user(&user).map_err(|why| error(None, why))?;
        instructions.push(instruction(base_line, format!("user {user}"), Action::User(user)));
    }
    let ready = match parsed.ready {
        Some(spanned) => {
            let offset = spanned.span().start;
            Some(ready(spanned.into_inner()).map_err(|why| error(Some(offset), why))?)
        }
        None => None,
    };
    Ok(Template {
        file: file.to_owned(),
        base,
        base_line,
        packages: parsed.packages,
        instructions,
        start: parsed.start.filter(|command| !command.trim().is_empty()),
        ready,
        shape: shape(&parsed.shape).map_err(|why| error(None, why))?,
        aliases,
    })
}

fn line_of(text: &str, offset: usize) -> u32 {
    let breaks = text.bytes().take(offset).filter(|byte| *byte == b'\n').count();
    u32::try_from(breaks + 1).unwrap_or(u32::MAX)
}

fn instruction(line: u32, text: String, action: Action) -> Instruction {
    Instruction { line, text, action }
}

/// Values are taken as they are: in TOML a `$` is a `$`.
fn literal(value: &str) -> String {
    let mut quoted = String::with_capacity(value.len() + 2);
    for c in value.chars() {
        if "\\'\"$".contains(c) || c.is_whitespace() {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted
}

fn settings(
    line: u32,
    env: BTreeMap<String, String>,
    workdir: Option<String>,
) -> Result<Vec<Instruction>, String> {
    let mut found = Vec::new();
    if !env.is_empty() {
        found.push(env_instruction(line, env)?);
    }
    if let Some(path) = workdir {
        found.push(instruction(line, format!("workdir {path}"), Action::Workdir(literal(&path))));
    }
    Ok(found)
}

fn env_instruction(line: u32, env: BTreeMap<String, String>) -> Result<Instruction, String> {
    env.keys().try_for_each(|name| check_variable(name))?;
    let text = format!("env {}", env.keys().cloned().collect::<Vec<_>>().join(" "));
    let pairs = env.into_iter().map(|(name, value)| (name, literal(&value))).collect();
    Ok(instruction(line, text, Action::Env(pairs)))
}

fn step(line: u32, given: StepText) -> Result<Vec<Instruction>, String> {
    let one = [given.run.is_some(), given.copy.is_some(), given.env.is_some(), given.workdir.is_some()];
    let StepText { run, copy, env, workdir, user, owner, mode } = given;
    if one.iter().filter(|it| **it).count() > 1 {
        return Err("a step has one of run, copy, env, workdir; write several steps".to_owned());
    }
    if copy.is_none() && (owner.is_some() || mode.is_some()) {
        return Err("owner and mode belong to a copy step".to_owned());
    }
    if let Some(user) = &user {
        check_user(user)?;
    }
    if let Some(words) = run {
        let command = match words {
            Words::One(line) => RunCommand::Shell(line),
            Words::Many(words) if words.is_empty() => return Err("run holds no command".to_owned()),
            Words::Many(words) => RunCommand::Exec(words),
        };
        let text = match &command {
            RunCommand::Shell(line) => format!("run {line}"),
            RunCommand::Exec(words) => format!("run {}", words.join(" ")),
        };
        return Ok(vec![instruction(line, text, Action::Run { command, user })]);
    }
    if let Some(mut sources) = copy {
        let target = sources.pop().filter(|_| !sources.is_empty());
        let target =
            target.ok_or("copy needs at least a source and a target: copy = [\"src\", \"/opt/src\"]")?;
        let text = format!("copy {} {target}", sources.join(" "));
        let octal = |text: String| {
            let bits = u32::from_str_radix(&text, 8).ok().filter(|bits| *bits <= 0o7777);
            bits.ok_or_else(|| format!("mode {text:?}: write it as an octal number in quotes"))
        };
        let mode = mode.map(octal).transpose()?;
        let owner = owner.or(user).map(|owner| check_owner(&owner)).transpose()?;
        let sources = sources.iter().map(|source| literal(source)).collect();
        let target = literal(&target);
        return Ok(vec![instruction(line, text, Action::Copy { sources, target, owner, mode })]);
    }
    if let Some(env) = env {
        return Ok(vec![env_instruction(line, env)?]);
    }
    if let Some(path) = workdir {
        return Ok(vec![instruction(line, format!("workdir {path}"), Action::Workdir(literal(&path)))]);
    }
    let user = user.ok_or("an empty step; write run, copy, env, workdir or user")?;
    Ok(vec![instruction(line, format!("user {user}"), Action::User(user))])
}

fn ready(given: ReadyText) -> Result<Ready, String> {
    let full = match given {
        ReadyText::Command(command) => ReadyFull { command: Some(command), port: None, timeout_s: None },
        ReadyText::Full(full) => full,
    };
    let probe = match (full.command, full.port) {
        (Some(command), None) if !command.trim().is_empty() => Probe::Command(command),
        (None, Some(port)) if port > 0 => Probe::Port(port),
        _ => return Err("ready needs a command or a port".to_owned()),
    };
    let timeout_s = full.timeout_s.unwrap_or(READY_TIMEOUT_S);
    if (1..=READY_TIMEOUT_S_MAX).contains(&timeout_s) {
        return Ok(Ready { probe, timeout_s });
    }
    Err(format!("ready.timeout_s = {timeout_s} is outside 1..={READY_TIMEOUT_S_MAX}"))
}

fn shape(given: &ShapeText) -> Result<Shape, String> {
    let default = Shape::default();
    let shape = Shape {
        cpus: given.cpus.unwrap_or(default.cpus),
        memory_mib: given.memory_mib.unwrap_or(default.memory_mib),
        disk_mib: given.disk_mib.unwrap_or(default.disk_mib),
        processes_max: given.processes_max.unwrap_or(default.processes_max),
    };
    shape.validate().map_err(|error| format!("shape: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"
name = "web"
aliases = ["web-2"]
from = "debian:bookworm"
packages = ["git"]
env = { MODE = "a $b" }
workdir = "/srv/app"
user = "user"
start = "python3 -m http.server 8000"
ready = { port = 8000, timeout_s = 30 }

[shape]
cpus = 1
memory_mib = 512

[[steps]]
copy = ["app", "/srv/app"]
owner = "user:user"

[[steps]]
run = "make"
user = "user"

[[steps]]
run = ["echo", "x y"]
"#;

    #[test]
    fn all_of_it() {
        let found = parse("dormouse.toml", WHOLE).unwrap();
        assert_eq!(found.aliases, ["web", "web-2"]);
        assert_eq!(found.packages, ["git"]);
        assert_eq!(found.ready, Some(Ready { probe: Probe::Port(8000), timeout_s: 30 }));
        assert_eq!((found.shape.cpus, found.shape.memory_mib, found.shape.disk_mib), (1, 512, 10_240));
        let lines: Vec<u32> = found.instructions.iter().map(|it| it.line).collect();
        assert_eq!(lines, [4, 4, 16, 20, 24, 4]);
        let value = crate::template::words::expand(
            match &found.instructions[0].action {
                Action::Env(pairs) => &pairs[0].1,
                other => panic!("{other:?}"),
            },
            &BTreeMap::new(),
        );
        assert_eq!(value.as_deref(), Ok("a $b"));
    }

    #[test]
    fn errors_name_the_line() {
        for (text, expected) in [
            ("from = \"debian:bookworm\"\nfrob = 1", "t.toml line 2: unknown field `frob`"),
            ("from = \"debian:bookworm\"\n[[steps]]\nrun = \"x\"\ncopy = [\"a\", \"b\"]", "one of run, copy"),
            ("name = \"x\"", "missing field `from`"),
            ("\nfrom = \"python:3\"", "t.toml line 2: \"python:3\" would have to come from a registry"),
            ("from = 3", "t.toml line 1: invalid type"),
            ("from = \"base\"\npackages = [\"git\"]", "packages need a Debian base"),
            ("from = \"base\"\nname = \"Upper\"", "cannot be a template's name"),
            ("from = \"base\"\n[shape]\ncpus = 0", "shape: cpus = 0 is outside"),
            ("from = \"base\"\nready = { port = 1, command = \"x\" }", "t.toml line 2: ready needs"),
            ("from = \"base\"\n[[steps]]\nenv = { \"A-B\" = \"x\" }", "cannot be the name of a variable"),
            ("from = \"base\"\n[[steps]]\n", "an empty step"),
        ] {
            let error = parse("t.toml", text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?} gave {error:?}");
        }
    }
}
