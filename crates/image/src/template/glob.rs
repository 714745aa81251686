//! Patterns of `COPY` and of `.dockerignore`: `*`, `?`, `[a-z]`, `\x` within a part, `**` for any parts.

/// True when the pattern matches all of the path. Both are relative, parts separated by `/`.
pub fn matches(pattern: &str, path: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('/').collect();
    let path: Vec<&str> = path.split('/').collect();
    parts_match(&pattern, &path)
}

pub fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// Dynamic programming over both lengths: no pattern takes exponential time.
fn parts_match(pattern: &[&str], path: &[&str]) -> bool {
    let mut row: Vec<bool> = vec![false; path.len() + 1];
    row[0] = true;
    for part in pattern {
        let mut next = vec![false; path.len() + 1];
        for at in 0..=path.len() {
            next[at] = if *part == "**" {
                row[at] || (at > 0 && next[at - 1])
            } else {
                at > 0 && row[at - 1] && part_matches(part, path[at - 1])
            };
        }
        row = next;
    }
    row[path.len()]
}

enum Token {
    Any,
    One,
    Class { negated: bool, ranges: Vec<(char, char)> },
    Literal(char),
}

fn part_matches(pattern: &str, text: &str) -> bool {
    let text: Vec<char> = text.chars().collect();
    let mut row: Vec<bool> = vec![false; text.len() + 1];
    row[0] = true;
    for token in tokens(pattern) {
        let mut next = vec![false; text.len() + 1];
        for at in 0..=text.len() {
            next[at] = match &token {
                Token::Any => row[at] || (at > 0 && next[at - 1]),
                one => at > 0 && row[at - 1] && one.fits(text[at - 1]),
            };
        }
        row = next;
    }
    row[text.len()]
}

impl Token {
    fn fits(&self, c: char) -> bool {
        match self {
            Self::Any | Self::One => true,
            Self::Literal(literal) => *literal == c,
            Self::Class { negated, ranges } => {
                ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != *negated
            }
        }
    }
}

fn tokens(pattern: &str) -> Vec<Token> {
    let chars: Vec<char> = pattern.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&next) = chars.get(at) {
        at += 1;
        tokens.push(match next {
            '*' => Token::Any,
            '?' => Token::One,
            '\\' => {
                let literal = chars.get(at).copied().unwrap_or('\\');
                at += 1;
                Token::Literal(literal)
            }
            '[' => match class(&chars[at..]) {
                Some((token, used)) => {
                    at += used;
                    token
                }
                None => Token::Literal('['),
            },
            literal => Token::Literal(literal),
        });
    }
    tokens
}

/// The rest of `[…]`, and how many characters it has; `None` where it is not closed.
fn class(chars: &[char]) -> Option<(Token, usize)> {
    let close = chars.iter().skip(1).position(|c| *c == ']')? + 1;
    let negated = matches!(chars[0], '^' | '!');
    let inner = &chars[usize::from(negated)..close];
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < inner.len() {
        if inner.get(at + 1) == Some(&'-') && at + 2 < inner.len() {
            ranges.push((inner[at], inner[at + 2]));
            at += 3;
        } else {
            ranges.push((inner[at], inner[at]));
            at += 1;
        }
    }
    Some((Token::Class { negated, ranges }, close + 1))
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        for (pattern, path, expected) in [
            ("*.txt", "a.txt", true),
            ("*.txt", "d/a.txt", false),
            ("**/*.txt", "a.txt", true),
            ("**/*.txt", "d/e/a.txt", true),
            ("d/**", "d/e/f", true),
            ("d/**", "e/d", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]x", "[]x", true),
            (r"\*x", "*x", true),
            (r"\*x", "ax", false),
            ("*", "", true),
            ("a*b*c", "aXXbYYc", true),
            ("ä*", "äö", true),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} on {path}");
        }
    }

    #[test]
    fn hostile_patterns_end() {
        assert!(!matches(&format!("{}b", "a*".repeat(60)), &"a".repeat(200)));
    }
}
