"""Prompts of about the requested length, made of common words. The same seed gives the same prompts, and no two prompts
are equal."""

import random

import msgspec

WORDS = tuple(
    """
    able about above across action after again against age ago agree air all almost alone along already always among
    animal another answer any appear apple area arm around arrive art ask autumn away baby back bad bag ball bank base
    bear beat beautiful become bed before begin behind believe below beside best better between big bird black blood
    blow blue board boat body book both bottom box boy branch bread break bridge bright bring brother brown build burn
    business busy but buy call came can captain car care carry case catch cause center certain chair chance change
    chapter chief child choose church circle city class clean clear climb clock close cloth cloud coast coat cold
    color come common company complete consider continue cook cool copper corn corner cost cotton could count country
    course cover cow crop cross crowd cry current cut dance danger dark daughter day dead deal dear decide deep desert
    design desk detail die differ dinner direct distance doctor dog door double down draw dream dress drink drive drop
    dry during each ear early earth east easy eat edge effect egg eight either else empty end enemy energy engine
    enough enter equal evening ever every example expect explain eye face fact fall family famous far farm fast father
    favor fear feed feel field fight figure fill final find fine finger finish fire first fish five flat floor flow
    flower fly follow food foot force foreign forest forget form forward found four free fresh friend front fruit full
    game garden gave general gentle get girl give glad glass gold gone good grand grass gray great green ground group
    grow guess hair half hand happen happy hard hat head hear heart heat heavy help here high hill history hold hole
    home honor hope horse hot hour house how however hundred hunt hurry ice idea inch increase indeed industry inside
    iron island join journey judge jump just keep key kind king kitchen know lady lake land language large last late
    laugh law lay lead leaf learn least leave left leg less letter level lie life lift light like line lion list
    listen little live long look lose lot loud love low machine main make man many map mark market master match matter
    meadow mean measure meat meet melody member metal method middle might mile milk mind minute miss modern moment
    money month moon more morning most mother motion mountain mouth move much music must name narrow nation nature
    near neck need never new next night nine noise none north nose note nothing notice number object ocean offer
    office often oil old once one only open opposite orange order other out over own page paint pair paper parent part
    party pass past path pattern pay peace people perhaps period person picture piece place plain plan plane plant
    play please point poor position possible pound power practice present president press pretty price print private
    problem produce promise proper provide public pull pupil push put quality quarter queen question quick quiet quite
    race radio rain raise range rather reach read ready real reason receive record red region remain remember report
    rest result return rich ride right ring rise river road rock roll room root rope rose round row rule run safe sail
    salt same sand save say scale school science sea season seat second secret see seed seem sell send sense sentence
    serve settle seven several shade shall shape share sharp ship shoe shop shore short should shoulder shout show
    side sight sign silence silver simple since sing sister six size skin sky sleep slow small smell smile snow social
    soft soil soldier some song soon sound south space speak special speed spend spoke spot spread spring square stand
    star start state station stay steel step stick still stone stop store story straight strange stream street
    strength strong student study subject success such sudden sugar suggest suit summer sun supply support sure
    surface surprise sweet swim system table tail take talk tall teach team ten test thank then there thick thin thing
    think third this though thought thousand three through throw time tiny today together tomorrow tone too tool top
    total touch toward town trade train travel tree triangle trip trouble truck true trust try turn twelve twenty two
    type under understand unit until upon use usual valley value various very view village visit voice wait walk wall
    want war warm wash watch water wave way wear weather week weight welcome well west what wheel when where which
    while white whole why wide wife wild will wind window winter wish with without woman wonder wood word work world
    worth write wrong yard year yellow yes yesterday yet young
    """.split()  # noqa: SIM905 - a list would fill five hundred lines
)


class Calibration(msgspec.Struct, frozen=True):
    """How a server counts our words: prompt tokens = per_prompt + per_word * words."""

    per_prompt: float
    per_word: float

    @classmethod
    def between(cls, words: tuple[int, int], tokens: tuple[int, int]) -> "Calibration":
        """From two prompts of different length."""
        per_word = max((tokens[1] - tokens[0]) / (words[1] - words[0]), 0.1)
        return cls(max(tokens[0] - per_word * words[0], 0.0), per_word)

    def words_for(self, tokens: int) -> int:
        """Words of a prompt of about so many tokens, at least one."""
        return max(1, round((tokens - self.per_prompt) / self.per_word))


def text(seed: str, num_words: int) -> str:
    """Words drawn from the seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def prompt(seed: int, name: str, num_words: int, num_shared: int) -> str:
    """A prompt that starts with `num_shared` words which all prompts of this seed share; the others are its own."""
    own = text(f"{seed}/{name}", max(1, num_words - num_shared))
    return f"{text(f'{seed}/shared', num_shared)} {own}" if num_shared else own
