//! process.Process against the agent's executable.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests, too")]

mod support;

use dormouse_wire::envd::connect::{Code, Error, message};
use dormouse_wire::envd::process::{
    CLOSE_STDIN, CONNECT, Empty, LIST, ListRequest, ListResponse, ProcessInput, ProcessSelector, Pty,
    PtySize, REPLAY_FROM_HEADER, REPLAY_OFFSET_HEADER, SEND_INPUT, SEND_SIGNAL, STREAM_INPUT, SelectRequest,
    SendInputRequest, SendSignalRequest, Signal, StartRequest, StreamInputData, StreamInputRequest,
    StreamInputStart, UPDATE, UpdateRequest,
};
use http::Method;
use support::{Agent, Stream, bash, channel, fifo, in_time};

fn select(pid: u32) -> SelectRequest {
    SelectRequest { process: Some(ProcessSelector::pid(pid)) }
}

async fn input(agent: &Agent, pid: u32, text: &str) -> Result<Empty, Error> {
    let input = ProcessInput { stdin: Some(text.to_owned().into()), pty: None };
    agent
        .call(SEND_INPUT, &SendInputRequest { process: Some(ProcessSelector::pid(pid)), input: Some(input) })
        .await
}

async fn signal(agent: &Agent, pid: u32, signal: Signal) -> Result<Empty, Error> {
    agent.call(SEND_SIGNAL, &SendSignalRequest { process: Some(ProcessSelector::pid(pid)), signal }).await
}

#[tokio::test]
async fn output_and_exit_code_come_whole() {
    let agent = Agent::start();
    let outcome = agent.run("echo out; echo err >&2; exit 3").await;
    let end = outcome.end.as_ref().unwrap();
    assert_eq!((outcome.stdout(), outcome.stderr()), ("out\n", "err\n"));
    assert_eq!((end.exit_code, end.exited, end.error.as_deref()), (3, true, Some("exit status 3")));
    assert_eq!(outcome.error, None);
    let many = agent.run("head -c 3000000 /dev/zero | tr '\\0' x").await;
    assert_eq!((many.stdout.len(), many.end.unwrap().exit_code), (3_000_000, 0));
}

#[tokio::test]
async fn a_process_has_the_users_surroundings() {
    let agent = Agent::start();
    let mut request = bash(
        "id -u; id -g; umask; pwd; echo $A $HOME $USER $LOGNAME; cat /proc/self/stat | cut -d' ' -f6; echo $$",
    );
    let process = request.process.as_mut().unwrap();
    process.cwd = Some("/usr".into());
    process.envs.insert("A".into(), "b c".into());
    let nobody = [("authorization", "Basic bm9ib2R5Og==")];
    let outcome = agent.client().await.start(&request, &nobody).await.rest().await;
    let lines: Vec<&str> = outcome.stdout().lines().collect();
    assert_eq!(&lines[..5], ["65534", "65534", "0022", "/usr", "b c /nonexistent nobody nobody"]);
    assert_eq!(lines[5], lines[6], "it leads its session");
}

#[tokio::test]
async fn what_cannot_be_started_says_why() {
    let agent = Agent::start();
    let mut client = agent.client().await;
    let stranger = [("authorization", "Basic eDo=")];
    let refused = client.start(&bash("true"), &stranger).await.rest().await.error.unwrap();
    assert_eq!((refused.code, refused.message.as_str()), (Code::Unauthenticated, "invalid username: 'x'"));
    let mut lost = bash("true");
    lost.process.as_mut().unwrap().cwd = Some("/no/where".into());
    let refused = client.start(&lost, &[]).await.rest().await.error.unwrap();
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (Code::InvalidArgument, "cwd '/no/where' does not exist")
    );
    let mut missing = bash("true");
    missing.process.as_mut().unwrap().cmd = "/no/program".into();
    let refused = client.start(&missing, &[]).await.rest().await.error.unwrap();
    assert_eq!(refused.code, Code::InvalidArgument);
    assert!(refused.message.contains("/no/program"), "{refused}");
    assert_eq!(
        client.start(&StartRequest::default(), &[]).await.rest().await.code(),
        Some(Code::InvalidArgument)
    );
    // The same connection still serves.
    assert_eq!(client.start(&bash("echo ok"), &[]).await.rest().await.stdout(), "ok\n");
}

#[tokio::test]
async fn input_is_written_and_closed() {
    let agent = Agent::start();
    let mut stream = agent.client().await.start(&bash("cat; echo end"), &[]).await;
    let pid = stream.pid().await;
    input(&agent, pid, "one\n").await.unwrap();
    stream.until("one\n").await;
    input(&agent, pid, "two\n").await.unwrap();
    let _: Empty = agent.call(CLOSE_STDIN, &select(pid)).await.unwrap();
    assert_eq!(stream.rest().await.stdout(), "two\nend\n");
}

#[tokio::test]
async fn without_stdin_there_is_no_input() {
    let agent = Agent::start();
    let mut request = bash("cat; echo eof; sleep 1000");
    request.stdin = Some(false);
    let mut stream = agent.client().await.start(&request, &[]).await;
    let pid = stream.pid().await;
    stream.until("eof").await;
    assert_eq!(input(&agent, pid, "x").await.unwrap_err().code, Code::Internal);
    signal(&agent, pid, Signal::Kill).await.unwrap();
    stream.rest().await;
}

#[tokio::test]
async fn input_streams_in_order() {
    let agent = Agent::start();
    let mut output = agent.client().await.start(&bash("exec cat"), &[]).await;
    let pid = output.pid().await;
    let (sender, body) = channel();
    let mut client = agent.client().await;
    let headers = [("content-type", "application/connect+json")];
    let (answer, ()) = tokio::join!(client.send(Method::POST, STREAM_INPUT, &headers, body), async {
        let start = StreamInputStart { process: Some(ProcessSelector::pid(pid)) };
        sender
            .send(message(&StreamInputRequest { start: Some(start), ..StreamInputRequest::default() }))
            .await
            .unwrap();
        for n in 0..500 {
            let input = ProcessInput { stdin: Some(format!("{n}\n").into()), pty: None };
            let data = StreamInputData { input: Some(input) };
            let event = StreamInputRequest { data: Some(data), ..StreamInputRequest::default() };
            sender.send(message(&event)).await.unwrap();
        }
        drop(sender);
    });
    let mut answer = Stream::of(answer);
    let _: Empty = agent.call(CLOSE_STDIN, &select(pid)).await.unwrap();
    let wanted: String = (0..500).map(|n| format!("{n}\n")).collect();
    assert_eq!(output.rest().await.stdout(), wanted);
    assert!(matches!(answer.next_raw().await.as_deref(), Some(b"{}")), "one message");
    assert!(matches!(answer.next().await, support::Next::End(None)));
}

#[tokio::test]
async fn an_input_stream_to_nobody_fails() {
    let agent = Agent::start();
    let start = StreamInputStart { process: Some(ProcessSelector::pid(4_000_000)) };
    let request = StreamInputRequest { start: Some(start), ..StreamInputRequest::default() };
    let mut stream = agent.client().await.stream(STREAM_INPUT, &request, &[]).await;
    assert_eq!(stream.headers["connection"], "close");
    assert_eq!(stream.rest().await.code(), Some(Code::NotFound));
}

#[tokio::test]
async fn a_terminal_is_one() {
    let agent = Agent::start();
    let mut request = bash("stty size; echo here > /dev/tty; read line; stty size; echo \"got $line\"");
    request.pty = Some(Pty { size: Some(PtySize { cols: 100, rows: 30 }) });
    let mut stream = agent.client().await.start(&request, &[]).await;
    let pid = stream.pid().await;
    assert!(stream.until("here").await.pty().contains("30 100"));
    let pty = Some(Pty { size: Some(PtySize { cols: 60, rows: 20 }) });
    let update = UpdateRequest { process: Some(ProcessSelector::pid(pid)), pty };
    let _: Empty = agent.call(UPDATE, &update).await.unwrap();
    assert_eq!(input(&agent, pid, "x").await.unwrap_err().code, Code::Internal);
    let refused = agent.call::<Empty>(CLOSE_STDIN, &select(pid)).await.unwrap_err();
    assert_eq!(refused.code, Code::FailedPrecondition);
    let typed = ProcessInput { stdin: None, pty: Some("hello\r".into()) };
    let typed = SendInputRequest { process: Some(ProcessSelector::pid(pid)), input: Some(typed) };
    let _: Empty = agent.call(SEND_INPUT, &typed).await.unwrap();
    let rest = in_time("the end", stream.rest()).await;
    assert!(rest.pty().contains("20 60") && rest.pty().contains("got hello"), "{}", rest.pty());
    assert_eq!(rest.end.unwrap().exit_code, 0);
}

#[tokio::test]
async fn interrupts_reach_what_runs_in_the_terminal() {
    let agent = Agent::start();
    let mut request = bash("trap 'echo interrupted; exit 9' INT; echo ready; while :; do sleep 1000; done");
    request.pty = Some(Pty::default());
    let mut stream = agent.client().await.start(&request, &[]).await;
    let pid = stream.pid().await;
    stream.until("ready").await;
    let typed = ProcessInput { stdin: None, pty: Some("\x03".into()) };
    let typed = SendInputRequest { process: Some(ProcessSelector::pid(pid)), input: Some(typed) };
    let _: Empty = agent.call(SEND_INPUT, &typed).await.unwrap();
    let rest = in_time("the end", stream.rest()).await;
    assert!(rest.pty().contains("interrupted"));
    assert_eq!(rest.end.unwrap().exit_code, 9);
}

#[tokio::test]
async fn a_killed_terminal_hangs_up_on_its_jobs() {
    let agent = Agent::start();
    let (path, gone) = fifo(agent.root.path(), "job");
    // With job control each job has a group of its own.
    let mut request = bash(&format!("set -m; sh -c 'exec 3>{path}; echo begun; exec sleep 1000' & wait"));
    request.pty = Some(Pty::default());
    let mut stream = agent.client().await.start(&request, &[]).await;
    let pid = stream.pid().await;
    stream.until("begun").await;
    signal(&agent, pid, Signal::Kill).await.unwrap();
    in_time("the end", stream.rest()).await;
    in_time("the job's end", gone).await.unwrap();
}

#[tokio::test]
async fn a_signal_ends_the_group_and_waits_for_no_descendant() {
    let agent = Agent::start();
    let (path, gone) = fifo(agent.root.path(), "group");
    let (kept_path, kept) = fifo(agent.root.path(), "kept");
    // One descendant in the group, and one that left it and keeps the output open.
    let script =
        format!("exec 3>{path}; setsid sh -c 'exec 3>{kept_path}; echo $$; sleep 1000' & sleep 1000; true");
    let mut stream = agent.client().await.start(&bash(&script), &[]).await;
    let pid = stream.pid().await;
    let left: i32 = stream.until("\n").await.stdout().trim().parse().unwrap();
    signal(&agent, pid, Signal::Term).await.unwrap();
    let end = in_time("the end", stream.rest()).await.end.unwrap();
    assert_eq!((end.exit_code, end.exited, end.status.as_str()), (-1, false, "signal: terminated"));
    let left = rustix::process::Pid::from_raw(left).unwrap();
    rustix::process::kill_process_group(left, rustix::process::Signal::KILL).unwrap();
    in_time("the group's end", gone).await.unwrap();
    in_time("the other's end", kept).await.unwrap();
    assert_eq!(signal(&agent, pid, Signal::Kill).await.unwrap_err().code, Code::NotFound);
}

#[tokio::test]
async fn after_a_normal_exit_output_is_read_to_its_end() {
    let agent = Agent::start();
    let (path, _go) = fifo(agent.root.path(), "go");
    let mut stream =
        agent.client().await.start(&bash(&format!("(echo x > {path}; echo late) & echo now")), &[]).await;
    assert_eq!(in_time("the end", stream.rest()).await.stdout(), "now\nlate\n");
}

#[tokio::test]
async fn the_deadline_kills_the_group() {
    let agent = Agent::start();
    let (path, gone) = fifo(agent.root.path(), "held");
    let script = format!("exec 3>{path}; sleep 1000 & sleep 1000");
    let outcome =
        agent.client().await.start(&bash(&script), &[("connect-timeout-ms", "400")]).await.rest().await;
    assert_eq!((outcome.code(), outcome.end), (Some(Code::DeadlineExceeded), None));
    in_time("the group's end", gone).await.unwrap();
}

#[tokio::test]
async fn a_client_that_goes_away_ends_nothing_and_misses_nothing() {
    let agent = Agent::start();
    let mut stream = agent
        .client()
        .await
        .start(&bash("echo first; read a; echo $a; echo err >&2; read b; echo $b"), &[])
        .await;
    assert_eq!(stream.headers[REPLAY_OFFSET_HEADER], "0");
    let pid = stream.pid().await;
    let received = stream.until("first\n").await.stdout.len();
    drop(stream);
    input(&agent, pid, "second\n").await.unwrap();
    let from = received.to_string();
    let mut again = agent.client().await.stream(CONNECT, &select(pid), &[(REPLAY_FROM_HEADER, &from)]).await;
    assert_eq!(again.headers[REPLAY_OFFSET_HEADER], from.as_str());
    assert_eq!(again.pid().await, pid);
    let middle = again.until("err\n").await;
    assert_eq!((middle.stdout(), middle.stderr()), ("second\n", "err\n"));
    input(&agent, pid, "third\n").await.unwrap();
    assert_eq!(again.rest().await.stdout(), "third\n");
    // It has ended, and is still known: without replay only start and end, with it everything.
    let mut late = agent.client().await.stream(CONNECT, &select(pid), &[]).await;
    assert_eq!(late.pid().await, pid);
    let outcome = late.rest().await;
    assert_eq!((outcome.stdout(), outcome.end.as_ref().unwrap().exit_code), ("", 0));
    let mut whole = agent.client().await.stream(CONNECT, &select(pid), &[(REPLAY_FROM_HEADER, "0")]).await;
    assert_eq!(whole.rest().await.stdout(), "first\nsecond\nthird\n");
}

#[tokio::test]
async fn a_limit_on_connect_ends_the_stream_alone() {
    let agent = Agent::start();
    let mut first = agent.client().await.start(&bash("read a; echo done"), &[]).await;
    let pid = first.pid().await;
    let mut limited =
        agent.client().await.stream(CONNECT, &select(pid), &[("connect-timeout-ms", "50")]).await;
    assert_eq!(limited.rest().await.code(), Some(Code::DeadlineExceeded));
    input(&agent, pid, "\n").await.unwrap();
    assert_eq!(first.rest().await.stdout(), "done\n");
}

#[tokio::test]
async fn silence_is_interrupted_by_keepalives() {
    let agent = Agent::start();
    let mut stream = agent.client().await.start(&bash("read a"), &[("keepalive-ping-interval", "1")]).await;
    let pid = stream.pid().await;
    assert!(stream.event().await.keepalive.is_some());
    input(&agent, pid, "\n").await.unwrap();
    stream.rest().await;
}

#[tokio::test]
async fn who_does_not_read_holds_the_process_back_not_the_memory() {
    const BYTES: usize = 60_000_000;
    let agent = Agent::start();
    let mut stream =
        agent.client().await.start(&bash(&format!("head -c {BYTES} /dev/zero; echo >&2 written")), &[]).await;
    stream.pid().await;
    // Nobody reads this stream while other work is done.
    for _ in 0..20 {
        assert_eq!(agent.run("head -c 100000 /dev/zero").await.stdout.len(), 100_000);
    }
    let outcome = in_time("all output", stream.rest()).await;
    assert_eq!((outcome.stdout.len(), outcome.stderr()), (BYTES, "written\n"));
    assert!(agent.memory_kib_max() < 40 << 10, "the agent had {} KiB", agent.memory_kib_max());
}

#[tokio::test]
async fn without_a_reader_a_process_never_waits() {
    let agent = Agent::start();
    let mut stream =
        agent.client().await.start(&bash("read a; head -c 20000000 /dev/zero; echo last"), &[]).await;
    let pid = stream.pid().await;
    drop(stream);
    input(&agent, pid, "\n").await.unwrap();
    let mut late = agent.client().await.stream(CONNECT, &select(pid), &[]).await;
    late.pid().await;
    assert_eq!(in_time("the end", late.rest()).await.end.unwrap().exit_code, 0);
    // Of what was dropped it is known how much it is.
    let mut replay = agent.client().await.stream(CONNECT, &select(pid), &[(REPLAY_FROM_HEADER, "0")]).await;
    let offset: usize = replay.headers[REPLAY_OFFSET_HEADER].to_str().unwrap().parse().unwrap();
    let kept = replay.rest().await.stdout;
    assert_eq!(offset + kept.len(), 20_000_005);
    assert!(kept.ends_with(b"last\n") && offset > 18_000_000, "{offset}");
}

#[tokio::test]
async fn processes_are_listed_and_named_by_tag() {
    let agent = Agent::start();
    let mut request = bash("read a");
    request.tag = Some("mine".into());
    let mut stream = agent.client().await.start(&request, &[]).await;
    let pid = stream.pid().await;
    let list: ListResponse = agent.call(LIST, &ListRequest {}).await.unwrap();
    let [listed] = list.processes.as_slice() else { panic!("{list:?}") };
    assert_eq!((listed.pid, listed.tag.as_deref()), (pid, Some("mine")));
    assert_eq!(listed.config, request.process);
    let by_tag = SendSignalRequest { process: Some(ProcessSelector::tag("mine")), signal: Signal::Kill };
    let _: Empty = agent.call(SEND_SIGNAL, &by_tag).await.unwrap();
    assert_eq!(stream.rest().await.end.unwrap().status, "signal: killed");
    let list: ListResponse = agent.call(LIST, &ListRequest {}).await.unwrap();
    assert_eq!(list.processes, []);
    let unknown = agent.call::<Empty>(CLOSE_STDIN, &select(4_000_000)).await.unwrap_err();
    assert_eq!(unknown.code, Code::NotFound);
    let nobody = agent.call::<Empty>(CLOSE_STDIN, &SelectRequest::default()).await.unwrap_err();
    assert_eq!(nobody.code, Code::InvalidArgument);
    let unspecified = signal(&agent, pid, Signal::Unspecified).await.unwrap_err();
    assert!(matches!(unspecified.code, Code::NotFound | Code::InvalidArgument));
}
