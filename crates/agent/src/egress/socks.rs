//! SOCKS5 (RFC 1928): `CONNECT` without authentication.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};

use dormouse_wire::carrier::Guest;
use dormouse_wire::stream::{Open, Refusal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::dial;
use crate::carrier::join;
use crate::context::Ctx;

pub const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const NO_METHOD: u8 = 0xFF;
const CONNECT: u8 = 1;
const ADDRESS_V4: u8 = 1;
const ADDRESS_NAME: u8 = 3;
const ADDRESS_V6: u8 = 4;
const COMMAND_NOT_SUPPORTED: u8 = 7;
const ADDRESS_NOT_SUPPORTED: u8 = 8;

pub async fn serve(mut socket: TcpStream, ctx: &Ctx, guest: &Guest) -> io::Result<()> {
    let _version = socket.read_u8().await?;
    let mut methods = vec![0; usize::from(socket.read_u8().await?)];
    socket.read_exact(&mut methods).await?;
    if !methods.contains(&NO_AUTHENTICATION) {
        return socket.write_all(&[VERSION, NO_METHOD]).await;
    }
    socket.write_all(&[VERSION, NO_AUTHENTICATION]).await?;
    let mut head = [0_u8; 4];
    socket.read_exact(&mut head).await?;
    if head[0] != VERSION || head[1] != CONNECT {
        return answer(&mut socket, COMMAND_NOT_SUPPORTED).await;
    }
    let Some(host) = read_host(&mut socket, head[3]).await? else {
        return answer(&mut socket, ADDRESS_NOT_SUPPORTED).await;
    };
    let port = socket.read_u16().await?;
    let _counted = ctx.begin_outbound();
    match dial(guest, &Open::Tcp { host, port }).await {
        Ok(stream) => {
            answer(&mut socket, 0).await?;
            join(&stream, &mut socket).await
        }
        Err(refused) => {
            tracing::debug!(message = %refused.message, "a connection was refused");
            answer(&mut socket, code(refused.why)).await
        }
    }
}

async fn read_host(socket: &mut TcpStream, kind: u8) -> io::Result<Option<String>> {
    Ok(match kind {
        ADDRESS_V4 => Some(Ipv4Addr::from(socket.read_u32().await?).to_string()),
        ADDRESS_V6 => Some(Ipv6Addr::from(socket.read_u128().await?).to_string()),
        ADDRESS_NAME => {
            let mut name = vec![0; usize::from(socket.read_u8().await?)];
            socket.read_exact(&mut name).await?;
            String::from_utf8(name).ok()
        }
        _ => None,
    })
}

fn code(why: Refusal) -> u8 {
    match why {
        Refusal::Denied => 2,
        Refusal::Unreachable => 4,
        Refusal::Closed => 5,
        Refusal::Unavailable => 1,
        Refusal::Invalid => ADDRESS_NOT_SUPPORTED,
    }
}

/// The bound address is not known here; clients do not use it.
async fn answer(socket: &mut TcpStream, code: u8) -> io::Result<()> {
    socket.write_all(&[VERSION, code, 0, ADDRESS_V4, 0, 0, 0, 0, 0, 0]).await
}
