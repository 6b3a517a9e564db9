"""The words of the sample corpus: tables, and the types that hold a word in all its forms.

An English word has one German translation, or one for each kind of subject, so that a sentence has one.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any, NamedTuple

Case = IntEnum("Case", "NOMINATIVE ACCUSATIVE DATIVE", start=0)
Gender = IntEnum("Gender", "MASCULINE FEMININE NEUTER PLURAL", start=0)  # columns of endings
Person = IntEnum("Person", "I YOU SHE WE THEY", start=0)  # "you" is always "du"
HABEN = ("habe", "hast", "hat", "haben", "haben")
SEIN = ("bin", "bist", "ist", "sind", "sind")


class Noun(NamedTuple):
    """A noun; ``english_plural`` is "" for mass nouns, ``singular`` and ``plural`` are German, by case."""

    english: str
    english_plural: str
    gender: Gender
    singular: tuple[str, ...]
    plural: tuple[str, ...]


class Slot(NamedTuple):
    """A complement of a verb: prepositions or "", the German case, and the kinds of nouns that suit it."""

    english: str
    german: str
    case: Case
    kinds: tuple[str, ...] = ()


class Verb(NamedTuple):
    """A verb: the kinds of its subjects, its complements, its forms, and by person the auxiliary of the perfect.

    German main clauses put the ``prefix`` last ("ab" in "abholen"); the infinitive and the present are without it.
    """

    subjects: list[str]
    slots: list[Slot]
    english: str = ""
    past: str = ""
    prefix: str = ""
    infinitive: str = ""
    present: tuple[str, ...] = ()
    participle: str = ""
    perfect: tuple[str, ...] = ()


def entries(table: str) -> list[Any]:
    """Return the words of each entry of a table; ``_`` is a space inside an expression."""
    return [tuple(word.replace("_", " ") for word in entry.split()) for entry in table.split(",")]


def add_s(expression: str) -> str:
    """Return an English plural or third person: the first word with its ending ("throws away")."""
    word, *rest = expression.split()
    word = re.sub(r"(?<=[^aeiou])y$", "ie", word)
    return " ".join([word + ("es" if re.search(r"(s|sh|ch|x|o)$", word) else "s"), *rest])


def conjugate(infinitive: str, changed: str) -> tuple[str, ...]:
    """Return the German present by person; ``changed`` is the stem of du and er ("sieh"), or "" if it is the same."""
    stem = re.sub(r"e?n$", "", infinitive)
    link = "e" if not changed and re.search(r"([td]|[^aeioulrhm][nm]|chn)$", stem) else ""
    changed = changed or stem
    second = changed + link + ("t" if re.search(r"[sßz]$", changed) else "st")
    return f"{stem}e", second, f"{changed}{link}t", infinitive, infinitive


def read_noun(english: str, german: str, gender: str, plural: str = "") -> Noun:
    """Read ``english[/plural] German gender [plural]``; a mass noun has no plural.

    A German plural that begins with ``-`` is an ending. ``w`` marks a weak noun (der Junge, den Jungen).
    """
    english, _, english_plural = english.partition("/")
    english_plural = (english_plural or add_s(english)) if plural else ""
    plural = german + plural[1:] if plural.startswith("-") else plural
    oblique = plural if gender.endswith("w") else german
    forms = (german, oblique, oblique), (plural, plural, plural if plural.endswith(("n", "s")) else f"{plural}n")
    return Noun(english, english_plural, Gender("mfn".index(gender[0])), *forms)


def read_verbs(frame: str, table: str) -> list[Verb]:
    """Read ``english past [prefix+]infinitive[/stem of du and er] [*]participle``; * marks a perfect with "sein".

    ``frame`` is ``subject kinds [> slot [> slot]]``, a slot ``[English preposition:German preposition:]case kinds``.
    """
    subjects, *complements = (part.split() for part in frame.split(" > "))
    slots = []
    for role, *kinds in complements:
        english, german, case = role.split(":") if ":" in role else ("", "", role)
        slots.append(Slot(english, german, Case.DATIVE if case == "dat" else Case.ACCUSATIVE, tuple(kinds)))
    verbs = []
    for english, past, german, participle in entries(table):
        prefix, _, forms = german.rpartition("+")
        infinitive, _, changed = forms.partition("/")
        forms = (infinitive, conjugate(infinitive, changed), participle.lstrip("*"))
        perfect = SEIN if participle.startswith("*") else HABEN
        verbs.append(Verb(subjects, slots, english, past, prefix, *forms, perfect))
    return verbs


_NOUNS = {
    "person": """man/men Mann m Männer, woman/women Frau f -en, boy Junge mw -n, girl Mädchen n -, teacher Lehrer m -,
        child/children Kind n -er, doctor Arzt m Ärzte, student Student mw -en, neighbor Nachbar mw -n,
        friend Freund m -e, colleague Kollege mw -n, baker Bäcker m -, guest Gast m Gäste, farmer Bauer mw -n,
        tourist Tourist mw -en, actress Schauspielerin f -nen, waitress Kellnerin f -nen, mayor Bürgermeister m -,
        queen Königin f -nen, brother Bruder m Brüder, sister Schwester f -n, daughter Tochter f Töchter,
        lawyer Anwalt m Anwälte, nurse Pflegerin f -nen, king König m -e, thief/thieves Dieb m -e,
        uncle Onkel m -, aunt Tante f -n, painter Maler m -, singer Sängerin f -nen, soldier Soldat mw -en""",
    "animal": """dog Hund m -e, cat Katze f -n, horse Pferd n -e, cow Kuh f Kühe, bird Vogel m Vögel, duck Ente f -n,
        mouse/mice Maus f Mäuse, rabbit Kaninchen n -, pig Schwein n -e, bear Bär mw -en, wolf/wolves Wolf m Wölfe""",
    "food": """apple Apfel m Äpfel, orange Orange f -n, tomato Tomate f -n, egg Ei n -er, sausage Wurst f Würste,
        cake Kuchen m -, roll Brötchen n -, bread Brot n, cheese Käse m, meat Fleisch n, rice Reis m, soup Suppe f""",
    "drink": "water Wasser n, milk Milch f, tea Tee m, coffee Kaffee m, beer Bier n, wine Wein m, juice Saft m",
    "text": """book Buch n Bücher, letter Brief m -e, newspaper Zeitung f -en, poem Gedicht n -e, report Bericht m -e,
        story Geschichte f -n, novel Roman m -e, postcard Postkarte f -n, song Lied n -er, play Stück n -e""",
    "thing": """bag Tasche f -n, key Schlüssel m -, cup Tasse f -n, plate Teller m -, ball Ball m Bälle,
        knife/knives Messer n -, basket Korb m Körbe, gift Geschenk n -e, picture Bild n -er, chair Stuhl m Stühle,
        box Kiste f -n, coat Mantel m Mäntel, jacket Jacke f -n, dress Kleid n -er, hat Hut m Hüte, bed Bett n -en,
        shoe Schuh m -e, skirt Rock m Röcke, lamp Lampe f -n, car Auto n -s, bicycle Fahrrad n Fahrräder,
        umbrella Regenschirm m -e, bottle Flasche f -n, clock Uhr f -en, candle Kerze f -n, mirror Spiegel m -""",
    "place": """park Park m -s, city Stadt f Städte, forest Wald m Wälder, village Dorf n Dörfer, school Schule f -n,
        library Bibliothek f -en, museum Museum n Museen, church Kirche f -n, hotel Hotel n -s, store Laden m Läden,
        hospital Krankenhaus n Krankenhäuser, kitchen Küche f -n, house Haus n Häuser, garden Garten m Gärten,
        restaurant Restaurant n -s, castle Schloss n Schlösser, office Büro n -s, factory Fabrik f -en""",
}
_ADJECTIVES = {
    "person": "rich reich, friendly freundlich, famous berühmt, clever klug, brave mutig, lazy faul, polite höflich",
    "person animal": "young jung, strong stark, tired müde, hungry hungrig, thirsty durstig, sad traurig, shy scheu",
    "animal thing place": "big groß, small klein, beautiful schön, ugly hässlich, dangerous gefährlich, huge riesig",
    "animal thing": "black schwarz, white weiß, brown braun, gray grau, golden golden, light leicht",
    "text thing place": "old alt, new neu, popular beliebt, strange seltsam, modern modern, cheap billig",
    "text": "interesting interessant, boring langweilig, long lang, short kurz, important wichtig, funny lustig",
    "thing": "red rot, blue blau, green grün, yellow gelb, heavy schwer, round rund, elegant elegant, broken kaputt",
    "food drink": "fresh frisch, good gut, delicious lecker, cold kalt, warm warm, healthy gesund",
    "place": "quiet ruhig, empty leer, clean sauber, noisy laut, cozy gemütlich, bright hell, safe sicher",
}
_VERBS = {
    "person": """work worked arbeiten gearbeitet, laugh laughed lachen gelacht, cry cried weinen geweint,
        dance danced tanzen getanzt, sing sang singen gesungen, get_up got_up auf+stehen *aufgestanden""",
    "person animal": """sleep slept schlafen/schläf geschlafen, arrive arrived an+kommen *angekommen,
        wake_up woke_up auf+wachen *aufgewacht, fall_asleep fell_asleep ein+schlafen/schläf *eingeschlafen""",
    "person animal > to:in:acc place": """go went gehen *gegangen, run ran laufen/läuf *gelaufen,
        come came kommen *gekommen, hurry hurried eilen *geeilt, come_back came_back zurück+kommen *zurückgekommen""",
    "person > acc person": """visit visited besuchen besucht, meet met treffen/triff getroffen,
        invite invited ein+laden/läd eingeladen, call called an+rufen angerufen, greet greeted grüßen gegrüßt""",
    "person > dat person": """thank thanked danken gedankt, answer answered antworten geantwortet,
        help helped helfen/hilf geholfen, follow followed folgen *gefolgt, trust trusted vertrauen vertraut""",
    "person animal > acc person animal thing": "see saw sehen/sieh gesehen, hear heard hören gehört",
    "person > acc animal": "feed fed füttern gefüttert, catch caught fangen/fäng gefangen",
    "person > acc text": "write wrote schreiben geschrieben, translate translated übersetzen übersetzt",
    "person > acc thing": "repair repaired reparieren repariert, clean cleaned putzen geputzt",
    "person > acc thing text": """buy bought kaufen gekauft, need needed brauchen gebraucht,
        steal stole stehlen/stiehl gestohlen, hide hid verstecken versteckt, find found finden gefunden,
        lose lost verlieren verloren, throw_away threw_away weg+werfen/wirf weggeworfen,
        take_along took_along mit+nehmen/nimm mitgenommen""",
    "person > acc food": "eat ate essen/iss gegessen, order ordered bestellen bestellt",
    "animal > acc food": "eat ate fressen/friss gefressen, smell smelled riechen gerochen",
    "person > acc drink": "drink drank trinken getrunken, spill spilled verschütten verschüttet",
    "person > dat person > acc text food drink thing": """give gave geben/gib gegeben, show showed zeigen gezeigt,
        send sent schicken geschickt, offer offered an+bieten angeboten, sell sold verkaufen verkauft""",
    "person > to::dat person": "listen listened zu+hören zugehört",
    "person > for:auf:acc person": "wait waited warten gewartet",
    "person > about:über:acc text person": "talk talked sprechen/sprich gesprochen",
    "person > of:von:dat person animal thing": "dream dreamed träumen geträumt",
    "person > after:auf:acc person animal thing": "look looked auf+passen aufgepasst",
}
_CLAUSE_VERBS = {
    "that": "say said sagen gesagt, believe believed glauben geglaubt, hope hoped hoffen gehofft",
    "whether": "ask asked fragen gefragt, find_out found_out heraus+finden herausgefunden",
    "to": "try tried versuchen versucht, promise promised versprechen/versprich versprochen",
}
_TIMES = {
    "PRESENT": "today heute, every_day jeden_Tag, this_week diese_Woche, in_winter im_Winter, at_night in_der_Nacht",
    "PAST": "yesterday gestern, last_week letzte_Woche, last_year letztes_Jahr, yesterday_evening gestern_Abend",
    "FUTURE": "tomorrow morgen, next_week nächste_Woche, next_month nächsten_Monat, soon bald, tonight heute_Abend",
}
_WEEKDAYS = """on_Monday am_Montag, on_Tuesday am_Dienstag, on_Wednesday am_Mittwoch, on_Thursday am_Donnerstag,
    on_Friday am_Freitag, on_Saturday am_Samstag, on_Sunday am_Sonntag"""

NOUNS = {kind: [read_noun(*entry) for entry in entries(table)] for kind, table in _NOUNS.items()}
ADJECTIVES = {
    kind: [entry for kinds, table in _ADJECTIVES.items() if kind in kinds.split() for entry in entries(table)]
    for kind in NOUNS
}
VERBS = [verb for frame, table in _VERBS.items() for verb in read_verbs(frame, table)]
CLAUSE_VERBS = {conjunction: read_verbs("person", table) for conjunction, table in _CLAUSE_VERBS.items()}
COPULA = Verb([], [])  # its forms are tenses
TIMES = {tense: entries(f"{_WEEKDAYS}, {table}") for tense, table in _TIMES.items()}
# English subject and object; German nominative, accusative and dative; person.
PRONOUNS = entries("""I me ich mich mir I, you you du dich dir YOU, he him er ihn ihm SHE, she her sie sie ihr SHE,
    we us wir uns uns WE, they them sie sie ihnen THEY""")
NAMES = entries("""Anna, Maria, Julia, Laura, Emma, Sophie, Clara, Helena, Irene, Nora, Peter, Paul, Martin, David,
    Felix, Simon, Robert, Oscar, Daniel, Victor""")
POSSESSIVES = entries("my mein, your dein, his sein, her ihr, our unser, their ihr")
NUMBERS = entries("two zwei, three drei, four vier, five fünf, six sechs, seven sieben, eight acht, nine neun")
COMPOUNDS = entries("""winter Winter, summer Sommer, spring Frühlings, night Nacht, Sunday Sonntags, island Insel,
    Christmas Weihnachts, mountain Berg, harbor Hafen, market Markt, farm Bauernhof, desert Wüsten, luxury Luxus,
    monastery Kloster, family Familien, dream Traum, toy Spielzeug, festival Fest, travel Reise, theater Theater""")
DEGREES = entries("very sehr, too zu, really wirklich, not nicht")
