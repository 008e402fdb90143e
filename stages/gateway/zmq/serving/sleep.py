"""Sleep and wake-up over ZeroMQ: what the routes of the same names do (stages/gateway/admin/sleep.py)."""

from http import HTTPStatus

from pipeline.client import protocol as p
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.zmq import errors
from pipeline.stages.gateway.zmq.peer import ClientPeer
from pipeline.stages.gateway.zmq.peer_sender import PeerChannel


async def answer(peer: ClientPeer, message: p.SetSleep | p.AskSleep, channel: PeerChannel) -> None:
    """Do what a client asks for, and answer when it is done."""
    found = await _state(peer, message)
    if not peer.connection.is_ending:
        channel.post(found)


async def _state(peer: ClientPeer, message: p.SetSleep | p.AskSleep) -> p.SleepState:
    try:
        control = peer.model.sleep_control
        if control is None:
            problem = "with gateway.admin_port, only the admin listener puts the server to sleep"
            raise ApiError(HTTPStatus.FORBIDDEN, problem, code="forbidden")
        if isinstance(message, p.SetSleep):
            await control.set(sleeps=message.sleeps, wakes_on_request=message.wakes_on_request)
        return p.SleepState(message.nonce, (await control.is_sleeping()).is_sleeping)
    except ApiError as error:
        return p.SleepState(message.nonce, failure=errors.on_the_wire(error))
