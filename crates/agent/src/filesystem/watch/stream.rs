//! The `WatchDir` stream: `start`, then events as they come, keepalives in silence.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use dormouse_wire::envd::connect::{self, Error};
use dormouse_wire::envd::filesystem::{Empty, WatchDirResponse};
use futures_util::Stream;
use tokio::time::Instant;

use super::{Watch, protocol_error};

struct Streaming {
    watch: Arc<Watch>,
    keepalive: Duration,
    deadline: Option<Instant>,
    stage: Stage,
}

enum Stage {
    Start,
    Running,
    Ended,
}

/// The frames of a watch. It ends with the deadline, with lost events, or with the client's connection
/// (the stream is dropped then, and the watch with it).
pub fn frames(
    watch: Arc<Watch>,
    keepalive: Duration,
    timeout: Option<Duration>,
) -> impl Stream<Item = Result<Bytes, io::Error>> + Send + 'static {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let streaming = Streaming { watch, keepalive, deadline, stage: Stage::Start };
    futures_util::stream::unfold(streaming, |mut streaming| async move {
        let frames = streaming.next().await?;
        Some((Ok(frames), streaming))
    })
}

impl Streaming {
    async fn next(&mut self) -> Option<Bytes> {
        match self.stage {
            Stage::Start => {
                self.stage = Stage::Running;
                Some(connect::message(&WatchDirResponse::Start(Empty {})))
            }
            Stage::Running => Some(self.run().await),
            Stage::Ended => None,
        }
    }

    async fn run(&mut self) -> Bytes {
        let silence = tokio::time::sleep(self.keepalive);
        tokio::pin!(silence);
        let deadline = self.deadline;
        let expired = async move {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(expired);
        loop {
            let (events, broken) = self.watch.take();
            let mut frames = Vec::new();
            for event in events {
                frames.extend_from_slice(&connect::message(&WatchDirResponse::Filesystem(Box::new(event))));
            }
            if let Some(why) = broken {
                frames.extend_from_slice(&self.end(protocol_error(why)));
            }
            if !frames.is_empty() {
                return frames.into();
            }
            tokio::select! {
                waited = self.watch.wait() => {
                    if let Err(why) = waited {
                        return self.end(Error::internal(format!("the watcher broke: {why}")));
                    }
                }
                () = &mut silence => return connect::message(&WatchDirResponse::Keepalive(Empty {})),
                () = &mut expired => {
                    return self.end(Error::deadline_exceeded("the time that was given for watching is over"));
                }
            }
        }
    }

    fn end(&mut self, error: Error) -> Bytes {
        self.stage = Stage::Ended;
        connect::end(Some(error))
    }
}
