//! The part of the Dockerfile language that a template is built from: FROM RUN COPY ENV WORKDIR USER.
//!
//! Dockerfile reference. Everything else is refused with its line, and with what to write instead:
//! an instruction that is skipped silently gives an image that is subtly another one.

use dormouse_types::Shape;

use super::{
    Action, Base, Instruction, RunCommand, STEPS_MAX, Template, TemplateError, check_user, check_variable,
    parse_base, words,
};

/// One instruction with its continuation lines joined.
struct Line {
    number: u32,
    text: String,
}

pub fn parse(file: &str, text: &str) -> Result<Template, TemplateError> {
    let error = |line, why| TemplateError { file: file.to_owned(), line: Some(line), why };
    let lines = join(text).map_err(|(line, why)| error(line, why))?;
    let mut base: Option<(u32, Base)> = None;
    let mut instructions = Vec::new();
    for line in lines {
        let (name, rest) = line.text.split_once(char::is_whitespace).unwrap_or((&line.text, ""));
        let (name, rest) = (name.to_ascii_uppercase(), rest.trim());
        let fail = |why| error(line.number, format!("{name}: {why}"));
        if rest.is_empty() && is_known(&name) {
            return Err(fail("it needs an argument".to_owned()));
        }
        match (name.as_str(), &base) {
            ("FROM", None) => base = Some((line.number, from(rest).map_err(fail)?)),
            ("FROM", Some(_)) => {
                return Err(fail(
                    "several stages are not supported; build another template and start from it".into(),
                ));
            }
            (known, None) if is_known(known) => {
                return Err(fail("the first instruction must be FROM".to_owned()));
            }
            _ => {
                let action = action(&name, rest).map_err(fail)?;
                instructions.push(Instruction { line: line.number, text: line.text.clone(), action });
            }
        }
        if instructions.len() > STEPS_MAX {
            return Err(error(line.number, format!("more than {STEPS_MAX} instructions")));
        }
    }
    let Some((base_line, base)) = base else {
        let why = "it has no FROM; begin with, for example, FROM debian:bookworm".to_owned();
        return Err(TemplateError { file: file.to_owned(), line: None, why });
    };
    Ok(Template {
        file: file.to_owned(),
        base,
        base_line,
        packages: Vec::new(),
        instructions,
        start: None,
        ready: None,
        shape: Shape::default(),
        aliases: Vec::new(),
    })
}

fn is_known(name: &str) -> bool {
    ["FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER"].contains(&name)
}

/// Joins lines that end with a backslash; drops comments, also between joined lines.
fn join(text: &str) -> Result<Vec<Line>, (u32, String)> {
    let mut found: Vec<Line> = Vec::new();
    let mut open: Option<Line> = None;
    for (number, line) in (1_u32..).zip(text.lines()) {
        let trimmed = line.trim();
        if let Some(comment) = trimmed.strip_prefix('#') {
            if found.is_empty() && open.is_none() {
                directive(comment).map_err(|why| (number, why))?;
            }
            continue;
        }
        if trimmed.is_empty() {
            continue;
        }
        let mut joined = open.take().unwrap_or(Line { number, text: String::new() });
        // Blanks in front belong to the layout of the file, except inside a joined line.
        let part = if joined.text.is_empty() { line.trim_start() } else { line };
        match part.trim_end().strip_suffix('\\') {
            Some(part) => {
                joined.text.push_str(part);
                open = Some(joined);
            }
            None => {
                joined.text.push_str(part.trim_end());
                found.push(joined);
            }
        }
    }
    if let Some(open) = open {
        return Err((
            open.number,
            "the instruction goes on after the last line: remove the backslash".to_owned(),
        ));
    }
    Ok(found)
}

/// `# escape=` changes what a backslash is; `# syntax=` asks for another language.
fn directive(comment: &str) -> Result<(), String> {
    let Some((key, value)) = comment.split_once('=') else { return Ok(()) };
    match (key.trim().to_ascii_lowercase().as_str(), value.trim()) {
        ("escape", "\\") => Ok(()),
        ("escape", other) => Err(format!("escape={other} is not supported, only the backslash is")),
        _ => Ok(()),
    }
}

fn from(rest: &str) -> Result<Base, String> {
    let mut words: Vec<&str> = rest.split_whitespace().collect();
    while let Some(flag) = words.first().filter(|word| word.starts_with("--")) {
        match flag.strip_prefix("--platform=") {
            Some("linux/amd64" | "linux/x86_64") => {}
            Some(other) => return Err(format!("platform {other} is not supported, only linux/amd64 is")),
            None => return Err(format!("{flag} is not supported")),
        }
        words.remove(0);
    }
    match words.as_slice() {
        [base] => parse_base(base),
        [base, as_word, _] if as_word.eq_ignore_ascii_case("as") => parse_base(base),
        _ => Err("write FROM BASE".to_owned()),
    }
}

fn action(name: &str, rest: &str) -> Result<Action, String> {
    match name {
        "RUN" => run(rest),
        "COPY" => copy(rest),
        "ENV" => env(rest),
        "WORKDIR" => Ok(Action::Workdir(rest.to_owned())),
        "USER" => {
            if !rest.contains('$') {
                check_user(rest)?;
            }
            Ok(Action::User(rest.to_owned()))
        }
        other => Err(instead_of(other)),
    }
}

fn run(rest: &str) -> Result<Action, String> {
    if rest.starts_with("--") {
        let flag: String = rest.chars().take_while(|c| !c.is_whitespace() && *c != '=').collect();
        return Err(format!("{flag} is not supported; remove it"));
    }
    here_document(rest)?;
    let command = match json_list(rest) {
        Some(list) if list.is_empty() => return Err("the list holds no command".to_owned()),
        Some(list) => RunCommand::Exec(list),
        None => RunCommand::Shell(rest.to_owned()),
    };
    Ok(Action::Run { command, user: None })
}

/// `<<WORD` outside of quotes opens a here-document, whose lines would be taken for instructions.
fn here_document(rest: &str) -> Result<(), String> {
    let opens = |at: usize| {
        let after = rest[at + 2..].trim_start_matches('-');
        after.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '"' || c == '\'')
            && !rest[..at].ends_with('<')
    };
    if rest.match_indices("<<").any(|(at, _)| opens(at)) {
        return Err(
            "here-documents are not supported; put the lines into a file and COPY it, or join them with && \
                    and a backslash"
                .to_owned(),
        );
    }
    Ok(())
}

/// The JSON form; anything that is not valid JSON is a shell line, as docker has it.
fn json_list(rest: &str) -> Option<Vec<String>> {
    rest.starts_with('[').then(|| serde_json::from_str(rest).ok())?
}

fn copy(rest: &str) -> Result<Action, String> {
    let (mut owner, mut mode) = (None, None);
    let mut rest = rest;
    while rest.starts_with("--") {
        let (flag, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        rest = after.trim_start();
        match flag.split_once('=') {
            Some(("--chown", value)) => owner = Some(check_owner(value)?),
            Some(("--chmod", value)) => {
                let bits = u32::from_str_radix(value, 8).ok().filter(|bits| *bits <= 0o7777);
                mode =
                    Some(bits.ok_or_else(|| format!("--chmod={value}: write the mode as an octal number"))?);
            }
            Some(("--from", _)) => {
                return Err(
                    "--from is not supported: a template has one stage, build another one and start from it"
                        .to_owned(),
                );
            }
            _ => return Err(format!("{flag} is not supported, only --chown and --chmod are")),
        }
    }
    here_document(rest)?;
    let mut sources = match json_list(rest) {
        Some(list) => list,
        None => words::split(rest)?,
    };
    let target = sources.pop().filter(|_| !sources.is_empty());
    let target = target.ok_or("write COPY SOURCE… TARGET")?;
    Ok(Action::Copy { sources, target, owner, mode })
}

/// `user`, `user:group`, by name or number.
pub fn check_owner(given: &str) -> Result<String, String> {
    let plain = |part: &str| {
        (1..=32).contains(&part.len())
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
            && !part.starts_with('-')
    };
    let mut parts = given.split(':');
    let fits = parts.by_ref().take(2).all(plain) && parts.next().is_none();
    if fits { Ok(given.to_owned()) } else { Err(format!("{given:?} is no owner: write USER or USER:GROUP")) }
}

fn env(rest: &str) -> Result<Action, String> {
    let words = words::split(rest)?;
    let first = words.first().map_or("", String::as_str);
    if !first.contains('=') {
        // The old form: one name, and all the rest is its value.
        let (name, value) = rest.split_once(char::is_whitespace).ok_or("write ENV NAME=VALUE")?;
        check_variable(name)?;
        return Ok(Action::Env(vec![(name.to_owned(), value.trim().to_owned())]));
    }
    let mut pairs = Vec::new();
    for word in &words {
        let (name, value) = word
            .split_once('=')
            .ok_or_else(|| format!("{word:?} has no value; write NAME=VALUE, quote blanks"))?;
        check_variable(name)?;
        pairs.push((name.to_owned(), value.to_owned()));
    }
    Ok(Action::Env(pairs))
}

fn instead_of(name: &str) -> String {
    let mend = match name {
        "ADD" => "use COPY for files of the context, RUN curl for others",
        "ARG" => "write the value itself, or use ENV",
        "CMD" | "ENTRYPOINT" => "say what to start with `start` in a TOML template or with --start",
        "HEALTHCHECK" => "say when it is ready with `ready` in a TOML template or with --ready",
        "EXPOSE" => "remove it: every port of a sandbox can be reached",
        "SHELL" => "use the JSON form: RUN [\"bash\", \"-c\", \"…\"]",
        "VOLUME" | "LABEL" | "MAINTAINER" | "STOPSIGNAL" | "ONBUILD" => {
            "remove it: it means nothing to a sandbox"
        }
        _ => "known are FROM, RUN, COPY, ENV, WORKDIR and USER",
    };
    format!("this instruction is not supported; {mend}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good(text: &str) -> Template {
        parse("Dockerfile", text).unwrap()
    }

    fn bad(text: &str) -> String {
        parse("Dockerfile", text).unwrap_err().to_string()
    }

    #[test]
    fn every_form_of_what_is_known() {
        let text = "# a comment\nFROM debian:bookworm-slim AS one\n\nrun apt-get update \\\n  # between\n  && true\n\
                    RUN [\"echo\", \"a b\"]\nCOPY --chown=user:user --chmod=755 a b /opt/\nCOPY [\"a b\", \"/c d\"]\n\
                    ENV A=1 B=\"two words\" C=x\\ y\nENV OLD form of it\nWORKDIR app\nUSER user\n";
        let found = good(text);
        assert_eq!(found.base, Base::Debian { suite: "bookworm".to_owned() });
        assert_eq!(found.base_line, 2);
        let actions: Vec<_> = found.instructions.iter().map(|it| (it.line, it.action.clone())).collect();
        let text = |text: &str| text.to_owned();
        assert_eq!(
            actions,
            [
                (4, Action::Run { command: RunCommand::Shell(text("apt-get update   && true")), user: None }),
                (7, Action::Run { command: RunCommand::Exec(vec![text("echo"), text("a b")]), user: None }),
                (
                    8,
                    Action::Copy {
                        sources: vec![text("a"), text("b")],
                        target: text("/opt/"),
                        owner: Some(text("user:user")),
                        mode: Some(0o755)
                    }
                ),
                (
                    9,
                    Action::Copy {
                        sources: vec![text("a b")],
                        target: text("/c d"),
                        owner: None,
                        mode: None
                    }
                ),
                (
                    10,
                    Action::Env(vec![
                        (text("A"), text("1")),
                        (text("B"), text("\"two words\"")),
                        (text("C"), text("x\\ y"))
                    ])
                ),
                (11, Action::Env(vec![(text("OLD"), text("form of it"))])),
                (12, Action::Workdir(text("app"))),
                (13, Action::User(text("user"))),
            ]
        );
    }

    #[test]
    fn errors_name_the_line_and_what_to_do() {
        let from = "FROM debian:bookworm\n";
        for (text, expected) in [
            (
                format!("{from}\nADD x /\n"),
                "Dockerfile line 3: ADD: this instruction is not supported; use COPY",
            ),
            (format!("{from}ENTRYPOINT [\"x\"]"), "Dockerfile line 2: ENTRYPOINT"),
            (format!("{from}RUN a \\\n b\nARG X"), "Dockerfile line 4: ARG"),
            (format!("{from}FROM debian:bookworm"), "line 2: FROM: several stages"),
            (format!("{from}COPY --from=x a b"), "line 2: COPY: --from is not supported"),
            (format!("{from}COPY a"), "line 2: COPY: write COPY"),
            (format!("{from}RUN"), "line 2: RUN: it needs an argument"),
            (format!("{from}RUN --mount=type=cache x"), "--mount is not supported"),
            (format!("{from}RUN cat <<EOF > x\nhello\nEOF"), "here-documents"),
            (format!("{from}RUN a \\"), "line 2: the instruction goes on"),
            (format!("{from}ENV 1A=2"), "cannot be the name of a variable"),
            (format!("{from}ENV A='x"), "a quote is not closed"),
            (format!("{from}USER a:b"), "a group cannot be chosen"),
            (format!("{from}FLY away"), "line 2: FLY: this instruction is not supported; known are"),
            ("RUN x".to_owned(), "line 1: RUN: the first instruction must be FROM"),
            ("# only\n".to_owned(), "Dockerfile: it has no FROM"),
            ("FROM python:3.12".to_owned(), "would have to come from a registry"),
            ("FROM --platform=linux/arm64 debian:bookworm".to_owned(), "platform linux/arm64"),
            ("# escape=`\nFROM debian:bookworm".to_owned(), "line 1: escape=` is not supported"),
        ] {
            assert!(bad(&text).contains(expected), "{text:?} gave {:?}", bad(&text));
        }
    }

    #[test]
    fn shell_here_strings_and_shifts_are_no_here_documents() {
        good("FROM debian:bookworm\nRUN bash -c 'cat <<< word; echo $((1 << 2))'");
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "(FROM debian:bookworm\n)?([A-Z]{2,6} [ -~]{0,40}\\\\?\n){0,6}") {
            let _ = parse("Dockerfile", &text);
        }
    }
}
