"""What the page must do, each as a function of a tab that shows it. They run in this order, in one tab."""

import json
from collections.abc import Callable
from typing import Any

from tools.check_page.actions import (
    IS_IDLE,
    LAST,
    NUM_REPLIES,
    SLOW_S,
    Check,
    ask,
    expect,
    ready,
    reload,
    send,
    settings,
)
from tools.check_page.devtools import Tab

HOSTILE = (
    "# Hi\n\n<img src=x onerror=alert(1)><script>alert(1)</script>\n\n[a](javascript:alert(1)) "
    "[b](https://example.com) ![c](https://example.com/x.png)\n\n```html\n<b>x</b>\n```"
)


async def it_streams_a_reply(tab: Tab) -> None:
    await settings(tab, temperature="0", max_tokens="400")
    await tab.run("window.sizes = []")
    await tab.run("window.watch = setInterval(() => sizes.push(document.body.textContent.length), 20)")
    await send(tab, "Write the numbers from one to sixty.")
    await tab.until(f"{NUM_REPLIES} === 1 && {IS_IDLE}", SLOW_S)
    await tab.run("clearInterval(window.watch)")
    expect(await tab.run("new Set(sizes).size") > 5, "the reply did not arrive bit by bit")
    expect(await tab.run(f"{LAST}.querySelectorAll('.hop').length") >= 8, "the reply has no bar of hops")


async def a_click_on_the_bar_shows_the_hops(tab: Tab) -> None:
    await tab.click(".message:last-child .timings summary")
    names = await tab.run(f"[...{LAST}.querySelectorAll('.hop-table th')].map(one => one.textContent)")
    hops = ["gateway", "tokenize", "admit", "queue", "prefill", "decode", "detokenize", "deliver"]
    expect(names == hops, f"the hops are {names}")


async def a_reply_can_be_stopped(tab: Tab) -> None:
    await settings(tab, temperature="0.5", max_tokens="4000")
    before = await tab.run(NUM_REPLIES)
    await send(tab, "Write a very long story about a lighthouse.")
    await tab.until(f"{NUM_REPLIES} > {before} && {LAST}.querySelector('.prose')?.textContent.length > 20", SLOW_S)
    expect(await tab.run("document.querySelector('.send').textContent") == "Stop", "there is no Stop")
    await tab.click(".send")
    await tab.until(f"{IS_IDLE} && {LAST}.textContent.includes('stopped')")
    health = "fetch('health').then(one => one.json()).then(one => one.open_requests === 0)"
    await tab.until(health)


async def a_reply_can_be_generated_again(tab: Tab) -> None:
    await settings(tab, temperature="0", max_tokens="8")
    before = await tab.run(NUM_REPLIES)
    await tab.run(f"window.old = {LAST}")
    await tab.run(f"[...{LAST}.querySelectorAll('.foot button')].at(-1).click()")
    await tab.until(f"{LAST} !== window.old && {IS_IDLE}", SLOW_S)
    expect(await tab.run(NUM_REPLIES) == before, "it is not in the place of the old one")


async def a_message_can_be_edited(tab: Tab) -> None:
    await tab.run("document.querySelector('.message.user .foot button').click()")
    await tab.until("document.querySelector('.message.user textarea') === document.activeElement")
    await tab.run("document.activeElement.value = ''")
    await tab.type("What is the capital of Greece?")
    await tab.press("Enter")
    await tab.until(f"{IS_IDLE} && {NUM_REPLIES} === 1 && {LAST}.textContent.includes('Athens')", SLOW_S)
    expect(await tab.run("document.querySelectorAll('.message').length") == 2, "what followed is still there")


async def the_conversation_is_kept(tab: Tab) -> None:
    await reload(tab)
    await tab.until(f"{NUM_REPLIES} === 1 && {LAST}.textContent.includes('Athens')")


async def tokens_show_the_likeliest_ones(tab: Tab) -> None:
    await tab.click(".toggle[aria-pressed]")
    await tab.until(f"{LAST}.textContent.includes('Regenerate this reply to see its tokens')")
    await ask(tab, "And of Italy?")
    await tab.until(f"{LAST}.querySelectorAll('.tokens .token').length > 2")
    await tab.hover(".message:last-child .tokens .token:nth-child(2)")
    rows = "document.querySelectorAll('.message:last-child .candidates:not([hidden]) li').length"
    await tab.until(f"{rows} >= 5")
    await tab.run("document.querySelector('.message:last-child .tokens').focus()")
    await tab.press("End")
    await tab.until(f"{LAST}.querySelector('.token.current') && {rows} >= 5")
    await tab.press("Escape")
    await tab.until(f"{rows} === 0")
    await tab.click(".toggle[aria-pressed]")
    await tab.until(f"!{LAST}.querySelector('.tokens')")


async def settings_are_checked_before_they_are_sent(tab: Tab) -> None:
    await tab.click(".toggle[aria-controls=settings]")
    await tab.run("document.querySelector('#set-temperature').focus()")
    await tab.run("document.activeElement.select()")
    await tab.type("3")
    before = await tab.run(NUM_REPLIES)
    await send(tab, "Hi")
    await tab.until("document.activeElement.id === 'set-temperature'")
    await tab.until("document.querySelector('#help-temperature').textContent.includes('from 0 to 2')")
    expect(await tab.run(NUM_REPLIES) == before, "it was sent")
    await tab.press("Escape")
    await tab.until("document.querySelector('.settings').hidden")
    await tab.run("document.querySelector('#message').value = ''")


async def errors_of_the_server_are_shown(tab: Tab) -> None:
    await settings(tab, max_tokens="8")
    await tab.run("document.querySelector('#system').value = 'word '.repeat(20000)")
    await ask(tab, "Hi")
    words = await tab.run(f"{LAST}.querySelector('.failure').textContent")
    expect("Error 400" in words and "8192" in words, f"the error is {words!r}")
    tab.problems = [one for one in tab.problems if "400 (Bad Request)" not in one]
    await settings(tab, temperature="0", max_tokens="8")
    await tab.run(f"{LAST}.querySelector('.failure button').click()")
    await tab.until(f"{IS_IDLE} && !{LAST}.querySelector('.failure') && {LAST}.textContent.length > 5", SLOW_S)


async def a_model_that_takes_no_files_has_no_button_for_them(tab: Tab) -> None:
    found: list[Any] = await tab.run(
        "[...document.querySelectorAll('.attach button')].map(one => [one.disabled, one.title, one.ariaLabel])"
    )
    expect(found == [], f"the buttons for files are {found}")
    expect(not await tab.run("document.querySelectorAll('input[type=file]').length"), "there is an input for files")


async def a_file_that_the_model_does_not_take_is_refused(tab: Tab) -> None:
    """The buttons are those of a model that takes files."""
    await tab.run("""import('./page/chat/attachments.js').then(({ Attachments }) => {
        const files = new Attachments(() => document.querySelector('#model').textContent);
        files.setCapabilities(['vision', 'audio']);
        document.querySelector('.composer').prepend(files.list, files.buttons); })""")
    await tab.until("document.querySelectorAll('.attach input').length === 3")
    for kind, name in (("image", "a.png"), ("audio", "a.wav")):
        script = f"""(() => {{ const input = document.querySelector('.composer > .attach input[accept="{kind}/*"]');
            const files = new DataTransfer(); files.items.add(new File(["x"], {name!r}, {{type: "{kind}/x"}}));
            input.files = files.files; input.dispatchEvent(new Event("change")); }})()"""
        await tab.run(script)
        await tab.until("document.querySelector('.files .refused')")
        words = await tab.run("document.querySelector('.files .refused').textContent")
        expect(f"No {kind} attached." in words and "messages[0].content" in words, f"the page says {words!r}")
        await tab.click(".files .refused button")
    await tab.run("document.querySelectorAll('.composer > .attach').forEach(one => one.remove())")
    await tab.run("document.querySelector('.composer > .files').remove()")
    tab.problems = [one for one in tab.problems if "400 (Bad Request)" not in one]


async def hostile_text_is_only_text(tab: Tab) -> None:
    conversation = json.dumps(json.dumps([{"role": "user", "text": HOSTILE}, {"role": "assistant", "text": HOSTILE}]))
    await tab.run(f"localStorage.setItem('pipeline.conversation', {conversation})")
    await reload(tab)
    found: dict[str, Any] = await tab.run(
        "({bad: document.querySelectorAll('.message img, .message script, .message b').length,"
        " links: [...document.querySelectorAll('.message a')].map(one => [one.href, one.rel])})"
    )
    expect(found["bad"] == 0, "HTML of a message became elements")
    expect(all(url.startswith("https://example.com/") for url, _ in found["links"]), f"links are {found['links']}")
    expect(found["links"] and all("noopener" in rel for _, rel in found["links"]), "a link has no rel=noopener")
    refused = await tab.run("(() => { try { document.body.innerHTML = '<p>x</p>'; } catch { return true; } })()")
    expect(refused, "the browser allows innerHTML")
    tab.problems = [one for one in tab.problems if "TrustedHTML" not in one and "Trusted Type" not in one]


CHOICES = "[...document.querySelectorAll('.chats .choice')].map(one => one.textContent)"
NEW_CHAT = "[...document.querySelectorAll('.tools button')].find(one => one.textContent === 'New chat').click()"


async def chats_are_kept_in_a_list(tab: Tab) -> None:
    await tab.until("!document.querySelector('.chats').hidden")
    before: list[str] = await tab.run(CHOICES)
    await tab.run(NEW_CHAT)
    await tab.until("document.querySelector('.welcome')")
    expect(await tab.run(CHOICES) == before, "a chat without a message is in the list")
    await ask(tab, "Say   yes")
    expect(await tab.run(CHOICES) == ["Say yes", *before], f"the list is {await tab.run(CHOICES)}")
    await tab.click(".chats li:nth-child(2) .choice")
    await tab.until(
        "document.querySelectorAll('.message').length === 2 && !document.body.textContent.includes('Say  ')"
    )
    await reload(tab)
    expect(await tab.run("document.querySelector('.choice[aria-current=true]').textContent") == before[0], "another")


async def a_chat_can_be_renamed_with_the_keyboard(tab: Tab) -> None:
    await tab.run("document.querySelectorAll('.chats .choice')[1].focus()")
    await tab.press("ArrowUp")
    expect(await tab.run("document.activeElement.textContent") == "Say yes", "ArrowUp goes elsewhere")
    for key, name in (("Escape", "Say yes"), ("Enter", "Agreed")):
        await tab.run("document.querySelector('.chats li .quiet').click()")
        await tab.until("document.activeElement.matches('.chats input')")
        await tab.type("Agreed")
        await tab.press(key)
        expect((await tab.run(CHOICES))[0] == name, f"{key}: the list is {await tab.run(CHOICES)}")
        expect(await tab.run("document.activeElement.textContent") == name, f"{key}: the focus is lost")
    await tab.press("Enter")
    await tab.until("document.querySelector('.message.user').textContent.includes('Say')")
    await ask(tab, "And no")
    expect((await tab.run(CHOICES))[0] == "Agreed", "a message changes the name")


async def a_deleted_chat_can_be_brought_back(tab: Tab) -> None:
    before: list[str] = await tab.run(CHOICES)
    for index in (0, 1):
        shown = await tab.run("document.querySelectorAll('.message').length")
        await tab.run(f"document.querySelectorAll('.chats li')[{index}].lastChild.click()")
        await tab.until(f"document.querySelectorAll('.chats .choice').length === {len(before) - 1}")
        expect(await tab.run("!!document.querySelector('.welcome')") == (index == 0), "the wrong chat is shown")
        await tab.click(".undo button")
        expect(await tab.run(CHOICES) == before, f"the list is {await tab.run(CHOICES)}")
        expect(await tab.run("document.querySelectorAll('.message').length") == shown, "messages are missing")


async def a_reply_goes_into_the_chat_that_asked(tab: Tab) -> None:
    await settings(tab, temperature="0", max_tokens="4000")
    await tab.run(NEW_CHAT)
    await send(tab, "Write a very long story about a mill.")
    await tab.until(f"{NUM_REPLIES} === 1 && {LAST}.querySelector('.prose')?.textContent.length > 20", SLOW_S)
    await tab.run(NEW_CHAT)
    await tab.until("document.querySelector('.welcome')")
    await tab.click(".chats li .choice")
    await tab.until(f"{NUM_REPLIES} === 1 && {LAST}.textContent.includes('stopped')")
    await settings(tab, temperature="0", max_tokens="8")


async def the_list_of_chats_is_over_the_conversation_on_a_phone(tab: Tab) -> None:
    await tab.resize(360, 740)
    await tab.until("document.querySelector('.chats').hidden")
    await tab.click(".toggle[aria-controls=chats]")
    expect(await tab.run("[innerWidth, document.documentElement.scrollWidth]") == [360, 360], "it is too wide")
    await tab.press("Escape")
    await tab.until("document.querySelector('.chats').hidden")
    await tab.click(".toggle[aria-controls=chats]")
    await tab.click(".chats li:nth-child(2) .choice")
    await tab.until("document.querySelector('.chats').hidden && document.querySelectorAll('.message').length > 0")
    await tab.resize(1280, 820)
    await tab.until("!document.querySelector('.chats').hidden")


async def begin_completion(tab: Tab, num_tokens: int) -> None:
    """Send a request that the page does not wait for, and that may fail."""
    prompt = f"prompt: 'Once', max_tokens: {num_tokens}, ignore_eos: true"
    body = f"{{model: document.querySelector('#model').textContent, {prompt}}}"
    await tab.run(
        "void fetch('v1/completions', {method: 'POST', headers: {'Content-Type': 'application/json'}, "
        f"body: JSON.stringify({body})}}).then(one => one.text()).catch(() => null)"
    )


async def the_stages_are_live(tab: Tab) -> None:
    await tab.click("#to-pipeline")
    await tab.until("document.querySelectorAll('.requests li').length > 0")
    await tab.until("document.querySelectorAll('.lines g').length === 8")
    await begin_completion(tab, 1500)
    await tab.until("document.querySelector('.box.execute .request') && document.querySelector('.requests li.open')")
    await tab.until("document.querySelector('.tokens-out .large').textContent !== '0 / s'")
    await tab.until("document.querySelectorAll('.lines .flows').length > 0")
    await tab.until("!document.querySelector('.requests li.open')", SLOW_S)
    await tab.click(".requests li button")
    await tab.until("document.querySelectorAll('.requests .detail:not([hidden]) .hop-table tr').length === 8")


async def a_hidden_view_asks_nothing(tab: Tab) -> None:
    await tab.click("#to-chat")
    await tab.until("!document.querySelector('#chat-view').hidden")
    await tab.run("new Promise(done => setTimeout(done, 600))")  # an answer may be on its way
    before = len(tab.urls)
    await tab.run("new Promise(done => setTimeout(done, 1500))")
    expect(len(tab.urls) == before, f"it asks for {tab.urls[before:]}")


async def the_theme_can_be_chosen(tab: Tab) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    await tab.set_media(scheme="dark")
    dark = await tab.run(paper)
    await tab.set_media(scheme="light")
    light = await tab.run(paper)
    expect(dark != light, "the page does not follow the system")
    await tab.click("#theme")
    await tab.click("#theme")
    expect(await tab.run(paper) == dark, "dark can't be chosen")
    await reload(tab)
    expect(await tab.run(paper) == dark, "the theme is forgotten")
    await tab.click("#theme")


async def it_fits_a_phone(tab: Tab) -> None:
    await tab.resize(360, 740)
    for view in ("#chat", "#pipeline"):
        await tab.run(f"location.hash = '{view}'")
        await tab.until(f"!document.querySelector('{view}-view').hidden")
        script = "[innerWidth, document.documentElement.scrollWidth, document.querySelector('main').scrollWidth]"
        expect(await tab.run(script) == [360] * 3, f"{view} is wider than 360 px: {await tab.run(script)}")
    await tab.run("location.hash = '#chat'")
    await tab.resize(1280, 820)


async def less_motion_is_respected(tab: Tab) -> None:
    await tab.set_media(motion="reduce")
    await tab.run("location.hash = '#pipeline'")
    await tab.until("document.querySelectorAll('.requests li').length > 0")
    running = await tab.run("document.getAnimations().filter(one => one.playState === 'running').length")
    expect(running == 0, f"{running} animations run")
    await tab.set_media()
    await tab.run("location.hash = '#chat'")


async def every_control_has_a_name(tab: Tab) -> None:
    script = """[...document.querySelectorAll('button, input, textarea, a[href]')].filter(one => !one.textContent.trim()
        && !one.getAttribute('aria-label') && !one.labels?.length).map(one => one.outerHTML.slice(0, 120))"""
    nameless = await tab.run(script)
    expect(not nameless, f"without a name: {nameless}")
    expect(await tab.run("document.documentElement.lang") == "en", "the page names no language")


CHECKS: tuple[Check, ...] = (
    it_streams_a_reply,
    a_click_on_the_bar_shows_the_hops,
    a_reply_can_be_stopped,
    a_reply_can_be_generated_again,
    a_message_can_be_edited,
    the_conversation_is_kept,
    tokens_show_the_likeliest_ones,
    settings_are_checked_before_they_are_sent,
    errors_of_the_server_are_shown,
    a_model_that_takes_no_files_has_no_button_for_them,
    a_file_that_the_model_does_not_take_is_refused,
    hostile_text_is_only_text,
    chats_are_kept_in_a_list,
    a_chat_can_be_renamed_with_the_keyboard,
    a_deleted_chat_can_be_brought_back,
    a_reply_goes_into_the_chat_that_asked,
    the_list_of_chats_is_over_the_conversation_on_a_phone,
    the_stages_are_live,
    a_hidden_view_asks_nothing,
    the_theme_can_be_chosen,
    it_fits_a_phone,
    less_motion_is_respected,
    every_control_has_a_name,
)


async def a_short_context_needs_no_setting(tab: Tab) -> None:
    """For a tab that shows a server with a context of 256 tokens."""
    for stored in (None, "1024", "250"):
        if stored is not None:
            await settings(tab, max_tokens=stored)
        before = await tab.run(NUM_REPLIES)
        if before:
            await send(tab, "Hi")
        else:
            await tab.click(".welcome button")
        await tab.until(f"{NUM_REPLIES} > {before} && {IS_IDLE}", SLOW_S)
        expect(not await tab.run(f"!!{LAST}.querySelector('.failure')"), f"max_tokens {stored}: the reply failed")
        await tab.click(".composer .tools .quiet:nth-last-child(2)")  # New chat
    tab.problems = [one for one in tab.problems if "400 (Bad Request)" not in one]


async def a_server_that_has_died_is_not_shown_alive(tab: Tab, kill: Callable[[], object]) -> None:
    """For a tab whose server `kill` ends."""
    await tab.run("location.hash = '#pipeline'")
    await begin_completion(tab, 240)
    await tab.until("document.querySelector('.server .dot.good')")
    await tab.until("document.querySelector('.tokens-out .large').textContent.includes('/ s')")
    kill()
    await tab.until("!document.querySelector('#pipeline-view .failure').hidden")
    shown = await tab.run(
        "[document.querySelector('.server .dot.good'), document.querySelector('.lines .flows'), "
        "document.querySelector('.requests li.open')].filter(one => one).map(one => one.className)"
    )
    expect(not shown, f"these seem alive: {shown}")
    figures = await tab.run("[...document.querySelectorAll('.figures .large, .box b')].map(one => one.textContent)")
    expect(set(figures) == {"–"}, f"the figures are {figures}")
    expect(await tab.run("document.querySelector('#model').textContent") == "no answer", "the model seems served")
    tab.problems = []  # the browser reports each connection that is refused


async def a_server_with_keys_asks_for_one(tab: Tab, key: str) -> None:
    """For a tab that shows a server with keys."""
    await tab.until("document.querySelector('.key-dialog')?.open")
    await tab.run("document.querySelector('#key').focus()")
    await tab.type("wrong")
    await tab.press("Enter")
    await tab.until("document.querySelector('.key-dialog').textContent.includes('does not accept')")
    await tab.run("document.querySelector('#key').focus()")
    await tab.type(key)
    await tab.press("Enter")
    await ready(tab)
    await settings(tab, temperature="0", max_tokens="8")
    expect("Athens" in await ask(tab, "What is the capital of Greece?"), "the reply is wrong")
    expect(await tab.run(f"!JSON.stringify(localStorage).includes({key!r})"), "the key is in localStorage")
    tab.problems = [one for one in tab.problems if "401 (Unauthorized)" not in one]
