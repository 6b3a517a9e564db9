"""The words of the sample corpus, as tables; `sample_words` turns each row into all its forms.

A space inside an expression is written ``_``. Every English word has one German counterpart (or one per grammatical
context), so that a sentence has one translation.

Nouns: ``english[/plural] German gender plural`` where a German plural that begins with ``-`` is appended to the
singular (``-`` alone: unchanged) and gender is m, f or n, followed by ``w`` for weak nouns (der Junge, den Jungen).
"""

from __future__ import annotations

# Mass nouns: no plural, no "a".
MASS_CLASSES = frozenset({"stuff", "drink", "cause"})
UNOWNED_CLASSES = frozenset({"in", "at", "by", "on", "cause"})
NOUN_TABLES = {
    "person": """
        man/men Mann m Männer, woman/women Frau f -en, boy Junge mw Jungen, girl Mädchen n -,
        child/children Kind n -er, teacher Lehrer m -, doctor Arzt m Ärzte, student Student mw Studenten,
        neighbor Nachbar mw Nachbarn, friend Freund m -e, colleague Kollege mw Kollegen, chef Koch m Köche,
        baker Bäcker m -, guest Gast m Gäste, farmer Bauer mw Bauern, policeman/policemen Polizist mw Polizisten,
        painter Maler m -, nurse Pflegerin f -nen, tourist Tourist mw Touristen, actress Schauspielerin f -nen,
        waitress Kellnerin f -nen, boss Chef m -s, mayor Bürgermeister m -, driver Fahrer m -,
        gardener Gärtner m -, lawyer Anwalt m Anwälte, queen Königin f -nen, king König m -e,
        journalist Journalist mw Journalisten, engineer Ingenieur m -e, dancer Tänzerin f -nen""",
    "relative": """
        brother Bruder m Brüder, sister Schwester f -n, mother Mutter f Mütter, father Vater m Väter,
        son Sohn m Söhne, daughter Tochter f Töchter, uncle Onkel m -, aunt Tante f -n,
        grandmother Großmutter f Großmütter, grandfather Großvater m Großväter""",
    "animal": """
        dog Hund m -e, cat Katze f -n, horse Pferd n -e, cow Kuh f Kühe, bird Vogel m Vögel,
        mouse/mice Maus f Mäuse, rabbit Kaninchen n -, duck Ente f -n, pig Schwein n -e, chicken Huhn n Hühner,
        bear Bär mw Bären""",
    "food": """
        apple Apfel m Äpfel, orange Orange f -n, tomato/tomatoes Tomate f -n, potato/potatoes Kartoffel f -n,
        egg Ei n -er, pear Birne f -n, cherry Kirsche f -n, sausage Wurst f Würste, cookie Keks m -e,
        roll Brötchen n -""",
    "dish": "cake Kuchen m -, soup Suppe f -n, salad Salat m -e, pizza Pizza f Pizzen, pancake Pfannkuchen m -",
    "stuff": """
        bread Brot n -, cheese Käse m -, rice Reis m -, meat Fleisch n -, chocolate Schokolade f -, fruit Obst n -""",
    "drink": """
        water Wasser n -, milk Milch f -, tea Tee m -, coffee Kaffee m -, beer Bier n -, wine Wein m -,
        juice Saft m -, lemonade Limonade f -""",
    "text": """
        book Buch n Bücher, letter Brief m -e, newspaper Zeitung f -en, magazine Zeitschrift f -en,
        poem Gedicht n -e, story Geschichte f -n, report Bericht m -e, novel Roman m -e, postcard Postkarte f -n,
        article Artikel m -, message Nachricht f -en""",
    "clothing": """
        coat Mantel m Mäntel, jacket Jacke f -n, dress Kleid n -er, shirt Hemd n -en, hat Hut m Hüte,
        shoe Schuh m -e, scarf/scarves Schal m -s, skirt Rock m Röcke, sweater Pullover m -, glove Handschuh m -e,
        boot Stiefel m -""",
    "thing": """
        bag Tasche f -n, key Schlüssel m -, umbrella Regenschirm m -e, cup Tasse f -n, plate Teller m -,
        bottle Flasche f -n, glass Glas n Gläser, knife/knives Messer n -, spoon Löffel m -, ball Ball m Bälle,
        pencil Bleistift m -e, clock Uhr f -en, candle Kerze f -n, box Kiste f -n, vase Vase f -n,
        basket Korb m Körbe, gift Geschenk n -e, camera Kamera f -s, suitcase Koffer m -, picture Bild n -er,
        blanket Decke f -n, mirror Spiegel m -""",
    "device": "computer Computer m -, radio Radio n -s, lamp Lampe f -n, machine Maschine f -n, oven Ofen m Öfen",
    "furniture": """
        table Tisch m -e, chair Stuhl m Stühle, bed Bett n -en, cupboard Schrank m Schränke,
        shelf/shelves Regal n -e, sofa Sofa n -s, armchair Sessel m -""",
    "vehicle": """
        car Auto n -s, bicycle Fahrrad n Fahrräder, bus Bus m Busse, train Zug m Züge, ship Schiff n -e,
        boat Boot n -e, tram Straßenbahn f -en, truck Lastwagen m -, taxi Taxi n -s""",
    "in": """
        park Park m -s, city Stadt f Städte, forest Wald m Wälder, village Dorf n Dörfer, school Schule f -n,
        library Bibliothek f -en, museum Museum n Museen, church Kirche f -n, hotel Hotel n -s,
        restaurant Restaurant n -s, store Laden m Läden, hospital Krankenhaus n Krankenhäuser,
        theater Theater n -, cinema Kino n -s, castle Schloss n Schlösser, café Café n -s, factory Fabrik f -en,
        zoo Zoo m -s, bakery Bäckerei f -en""",
    "room": """
        kitchen Küche f -n, house Haus n Häuser, apartment Wohnung f -en, room Zimmer n -, cellar Keller m -,
        garden Garten m Gärten, office Büro n -s, bathroom Bad n Bäder""",
    "at": """
        station Bahnhof m Bahnhöfe, airport Flughafen m Flughäfen, harbor Hafen m Häfen, bus_stop Haltestelle f -n""",
    "by": "lake See m -n, river Fluss m Flüsse, beach Strand m Strände",
    "on": """
        island Insel f -n, mountain Berg m -e, square Platz m Plätze, bridge Brücke f -n, street Straße f -n,
        farm Bauernhof m Bauernhöfe""",
    "part": "door Tür f -en, window Fenster n -, roof Dach n Dächer, wall Wand f Wände, entrance Eingang m Eingänge",
    "event": """
        party Fest n -e, concert Konzert n -e, game Spiel n -e, trip Reise f -n, exam Prüfung f -en,
        meeting Sitzung f -en, wedding Hochzeit f -en""",
    "film": "film Film m -e",
    "song": "song Lied n -er",
    "idea": "plan Plan m Pläne, idea Idee f -n, problem Problem n -e, question Frage f -n, dream Traum m Träume",
    "cause": """
        rain Regen m -, weather Wetter n -, snow Schnee m -, storm Sturm m -, noise Lärm m -, traffic Verkehr m -,
        heat Hitze f -""",
}

# First part of a compound, its German form, and the nouns it may be joined to ("kitchen table", "Küchentisch").
COMPOUNDS = """
    kitchen Küchen table chair door window lamp cupboard clock, garden Garten table chair door house party lamp,
    office Büro chair lamp table, cellar Keller door window, winter Winter coat jacket shoe boot, summer Sommer dress
    jacket shoe party hat, leather Leder jacket shoe bag glove boot, school Schul book bag bus friend, city Stadt park
    library bus, apple Apfel cake juice, chocolate Schokoladen cake, tomato Tomaten soup salad juice,
    potato Kartoffel soup salad, vegetable Gemüse soup, orange Orangen juice, coffee Kaffee cup machine, tea Tee cup,
    glass Glas door bottle vase table, history Geschichts book teacher, music Musik teacher, sports Sport teacher
    shoe bag store, shoe Schuh store, flower Blumen vase store, toy Spielzeug store, bus Bus driver, taxi Taxi driver,
    truck Lastwagen driver, wine Wein bottle, travel Reise bag, hotel Hotel room guest, detective Kriminal novel"""

# english german [comparative superlative, both languages]; "german/stem" where endings go on another stem.
ADJECTIVE_TABLE = """
    old alt older älter oldest ältest, young jung younger jünger youngest jüngst,
    big groß bigger größer biggest größt, small klein smaller kleiner smallest kleinst,
    rich reich richer reicher richest reichst,
    strong stark stronger stärker strongest stärkst, new neu newer neuer newest neuest,
    cheap billig cheaper billiger cheapest billigst, heavy schwer heavier schwerer heaviest schwerst,
    long lang longer länger longest längst, short kurz shorter kürzer shortest kürzest,
    beautiful schön more_beautiful schöner most_beautiful schönst,
    expensive teuer/teur more_expensive teurer most_expensive teuerst,
    interesting interessant more_interesting interessanter most_interesting interessantest,
    important wichtig more_important wichtiger most_important wichtigst,
    friendly freundlich friendlier freundlicher friendliest freundlichst,
    famous berühmt more_famous berühmter most_famous berühmtest,
    tired müde/müd, happy glücklich, poor arm, clever klug, sick krank, hungry hungrig, brave mutig, lazy faul,
    polite höflich, curious neugierig, black schwarz, white weiß, red rot, blue blau, green grün, yellow gelb,
    brown braun, gray grau, fat dick, wild wild, fresh frisch, warm warm, cold kalt, sweet süß, delicious lecker,
    modern modern, strange seltsam, boring langweilig, funny lustig, sad traurig, quiet ruhig, dark dunkel/dunkl,
    empty leer, broken kaputt, bad schlecht, dangerous gefährlich, difficult schwierig, good gut, fast schnell"""
ADJECTIVES_OF = {
    "person": "old young rich strong friendly famous tired happy poor clever sick hungry brave lazy polite curious",
    "relative": "old young friendly tired happy clever sick brave curious",
    "animal": "old young big small strong tired hungry black white brown gray fat wild dangerous",
    "food": "big small cheap expensive fresh sweet delicious",
    "dish": "cheap expensive fresh warm cold delicious",
    "stuff": "cheap expensive fresh delicious good",
    "drink": "cheap expensive fresh warm cold delicious good",
    "text": "old new long short interesting important boring funny sad strange good",
    "clothing": "old new beautiful expensive cheap warm black white red blue green yellow brown gray long",
    "thing": "old new big small heavy beautiful expensive cheap black white red blue green yellow brown broken",
    "device": "old new big small heavy expensive cheap modern broken good",
    "furniture": "old new big small heavy beautiful expensive cheap modern white brown red green",
    "vehicle": "old new big small expensive red blue green yellow white black fast broken",
    "in": "old new big small beautiful quiet modern famous", "room": "old new big small beautiful quiet modern dark",
    "at": "old new big small modern", "by": "big small beautiful quiet", "on": "big small beautiful quiet dangerous",
    "part": "old new big small heavy white green brown broken", "song": "old new sad beautiful funny short",
    "event": "big small long boring interesting beautiful important", "cause": "strong bad",
    "film": "old new long boring interesting funny sad good", "idea": "new old strange interesting important",
}  # fmt: skip

# english past | German (prefix+verb, then the changed stem of du and er, or ich,du,er) | participle (* with sein)
#   | subjects | complement | adverbials: (t)ime (p)lace (m)anner (w)ith somebody
VERB_TABLE = """
    buy bought | kaufen | gekauft | person relative | acc food dish stuff drink text clothing thing furniture | tpw
    sell sold | verkaufen | verkauft | person | acc clothing thing furniture vehicle food | tp
    see saw | sehen sieh | gesehen | person relative animal | acc person animal thing vehicle relative | tp
    hear heard | hören | gehört | person relative | acc person animal song vehicle | tp
    find found | finden | gefunden | person relative | acc text clothing thing animal | tpw
    need needed | brauchen | gebraucht | person relative | acc clothing thing furniture device vehicle food drink |
    have had | haben habe,hast,hat | gehabt | person relative | acc clothing animal vehicle furniture device idea |
    love loved | lieben | geliebt | person relative | acc person relative animal film song |
    like liked | mögen mag,magst,mag | gemocht | person relative | acc animal food dish stuff drink song |
    visit visited | besuchen | besucht | person relative | acc person relative in | tw
    meet met | treffen triff | getroffen | person relative | acc person relative | tp
    help helped | helfen hilf | geholfen | person relative | dat person relative | tpm
    thank thanked | danken | gedankt | person relative | dat person relative | tm
    follow followed | folgen | *gefolgt | person animal | dat person animal vehicle | tmp
    listen_to listened | zu+hören | zugehört | person relative | dat person relative | tm
    answer answered | antworten | geantwortet | person relative | dat person relative | tm
    congratulate congratulated | gratulieren | gratuliert | person relative | dat person relative | tp
    invite invited | ein+laden läd | eingeladen | person relative | acc person relative | t
    call called | an+rufen | angerufen | person relative | acc person relative | tm
    pick_up picked | ab+holen | abgeholt | person relative | acc person relative thing | tp
    greet greeted | grüßen | gegrüßt | person relative | acc person relative | tpm
    look_for looked | suchen | gesucht | person relative animal | acc person animal thing food | tpmw
    read read | lesen lies | gelesen | person relative | acc text | tpmw
    write wrote | schreiben | geschrieben | person | acc text song | tpm
    translate translated | übersetzen | übersetzt | person | acc text song | tpmw
    describe described | beschreiben | beschrieben | person | acc person thing event in | tm
    understand understood | verstehen | verstanden | person relative | acc person text film idea |
    explain explained | erklären | erklärt | person | acc idea text | tpm
    eat ate | essen iss | gegessen | person relative | acc food dish stuff | tpmw
    eat ate | fressen friss | gefressen | animal | acc food stuff | tpm
    drink drank | trinken | getrunken | person relative | acc drink | tpmw
    cook cooked | kochen | gekocht | person relative | acc cooked | tpmw
    order ordered | bestellen | bestellt | person relative | acc dish drink text furniture | tp
    wash washed | waschen wäsch | gewaschen | person relative | acc clothing food vehicle animal | tpmw
    clean cleaned | putzen | geputzt | person relative | acc part room furniture vehicle | tmw
    repair repaired | reparieren | repariert | person | acc vehicle device part furniture | tpmw
    paint painted | malen | gemalt | person | acc animal in on | tpm
    draw drew | zeichnen | gezeichnet | person relative | acc animal person vehicle | tpm
    build built | bauen | gebaut | person | acc buildable furniture part | tw
    open opened | öffnen | geöffnet | person relative | acc openable closable | tm
    close closed | zu+machen | zugemacht | person relative | acc closable | tm
    turn_on turned | ein+schalten | eingeschaltet | person relative | acc device | tpm
    turn_off turned | aus+schalten | ausgeschaltet | person relative | acc device | tpm
    lose lost | verlieren | verloren | person relative | acc thing clothing game | tp
    forget forgot | vergessen vergiss | vergessen | person relative | acc thing event person text clothing | t
    carry carried | tragen träg | getragen | person animal | acc thing furniture | tm
    wear wore | tragen träg | getragen | person relative | acc clothing | tp
    try_on tried | an+probieren | anprobiert | person relative | acc clothing | tpm
    watch watched | an+sehen sieh | angesehen | person relative | acc film game | tpw
    take_along took | mit+nehmen nimm | mitgenommen | person relative | acc thing clothing text food animal | t
    bring_along brought | mit+bringen | mitgebracht | person relative | acc dish drink person thing | t
    throw_away threw | weg+werfen wirf | weggeworfen | person relative | acc thing text clothing | t
    borrow borrowed | aus+leihen | ausgeliehen | person relative | acc text thing vehicle | tp
    feed fed | füttern | gefüttert | person relative | acc animal | tpmw
    catch caught | fangen fäng | gefangen | person animal | acc animal | tpm
    hide hid | verstecken | versteckt | person relative | acc thing text | tp
    steal stole | stehlen stiehl | gestohlen | person | acc thing vehicle | tp
    photograph photographed | fotografieren | fotografiert | person | acc person animal in on vehicle | tmw
    admire admired | bewundern | bewundert | person | acc person thing in on | t
    sing sang | singen | gesungen | person relative | acc song | tpmw
    prepare prepared | vor+bereiten | vorbereitet | person relative | acc event | tpmw
    plan planned | planen | geplant | person relative | acc event | tmw
    clean_up cleaned | auf+räumen | aufgeräumt | person relative | acc room | tmw
    give gave | geben gib | gegeben | person relative | give thing text food clothing | tp
    show showed | zeigen | gezeigt | person relative | give thing text animal in part | t
    send sent | schicken | geschickt | person relative | give thing text clothing | t
    lend lent | leihen | geliehen | person relative | give thing text clothing vehicle | t
    offer offered | an+bieten | angeboten | person relative | give dish drink food stuff | tp
    bring brought | bringen | gebracht | person relative | give thing text drink food | t
    tell told | erzählen | erzählt | person relative | give story | tp
    wait_for waited | warten | gewartet | person relative | auf acc person relative vehicle event | tpmw
    talk_about talked | sprechen sprich | gesprochen | person relative | über acc event idea film person in | tpmw
    think_of thought | denken | gedacht | person relative | an acc event person relative idea | t
    dream_of dreamed | träumen | geträumt | person relative | von dat event vehicle in person animal | t
    laugh_about laughed | lachen | gelacht | person relative | über acc film text idea | tpw
    look_after looked | auf+passen | aufgepasst | person relative | auf acc person animal thing | tpm
    take_part_in took | teil+nehmen nimm | teilgenommen | person relative | an dat event | t
    ask_for asked | bitten | gebeten | person relative | um acc drink stuff thing | tpm
    look_forward_to looked | sich freuen | gefreut | person relative | auf acc event film dish |
    remember remembered | sich erinnern | erinnert | person relative | an acc event person text in | t
    complain_about complained | sich beschweren | beschwert | person relative | über acc event person text in | tm
    sleep slept | schlafen schläf | geschlafen | person relative animal | | tp
    work worked | arbeiten | gearbeitet | person relative | | tpmw
    laugh laughed | lachen | gelacht | person relative | | tpw
    cry cried | weinen | geweint | person relative | | tp
    smile smiled | lächeln | gelächelt | person relative | | t
    dance danced | tanzen | getanzt | person relative | | tpw
    learn learned | lernen | gelernt | person relative | | tpw
    play played | spielen | gespielt | playful | | tpmw
    bark barked | bellen | gebellt | dog | | tp
    get_up got | auf+stehen | *aufgestanden | person relative | | tm
    fall_asleep fell | ein+schlafen schläf | *eingeschlafen | person relative animal | | tp
    wake_up woke | auf+wachen | *aufgewacht | person relative animal | | tp
    come_back came | zurück+kommen | *zurückgekommen | person relative animal | | tw
    arrive arrived | an+kommen | *angekommen | person relative vehicle arriving | | tp
    depart departed | ab+fahren fähr | *abgefahren | vehicle | | t
    begin began | beginnen | begonnen | event film | | t
    play_the_piano played | Klavier_+spielen | Klavier_gespielt | person relative | | tpw
    play_the_guitar played | Gitarre_+spielen | Gitarre_gespielt | person relative | | tpw
    play_soccer played | Fußball_+spielen | Fußball_gespielt | person relative | | tpw
    go_for_a_walk went | spazieren_+gehen | *spazieren_gegangen | person relative | | tpw
    walk walked | gehen | *gegangen | person relative | to | tmw
    drive drove | fahren fähr | *gefahren | person relative | to | tmw
    run ran | laufen läuf | *gelaufen | person relative animal | to | tm
    come came | kommen | *gekommen | person relative | to | tmw
    travel traveled | reisen | *gereist | person relative | far | tw
    fly flew | fliegen | *geflogen | person relative | far | tw
    live lived | wohnen | gewohnt | person relative | in home |
    stay stayed | bleiben | *geblieben | person relative | in | tw
    put put | legen | gelegt | person relative | put text clothing flat | tm
    place placed | stellen | gestellt | person relative | put upright | tm
    stand stood | stehen | gestanden | upright | lie | t
    lie - | liegen | gelegen | text clothing animal | lie | t
    sit sat | sitzen | gesessen | person relative animal | lie | tw
    cost cost | kosten | gekostet | clothing thing furniture device vehicle dish | price |
    rain rained | regnen | geregnet | weather | | tp
    snow snowed | schneien | geschneit | weather | | tp"""
# Verbs that take a clause, in the same columns: that (dass), whether (ob), or an infinitive with "to" (zu).
CLAUSE_VERB_TABLE = """
    say said | sagen | gesagt | person relative | that |
    think thought | glauben | geglaubt | person relative | that |
    know knew | wissen weiß,weißt,weiß | gewusst | person relative | that |
    hope hoped | hoffen | gehofft | person relative | that |
    notice noticed | bemerken | bemerkt | person relative | that |
    dream dreamed | träumen | geträumt | person relative | that |
    ask asked | fragen | gefragt | person relative | whether |
    wonder wondered | sich fragen | gefragt | person relative | whether |
    try tried | versuchen | versucht | person relative | zu |
    promise promised | versprechen versprich | versprochen | person relative | zu |
    forget forgot | vergessen vergiss | vergessen | person relative | zu |
    decide decided | beschließen | beschlossen | person relative | zu |
    hope hoped | hoffen | gehofft | person relative | zu |"""
# Noun classes narrower than a table of nouns, or across tables.
NARROW_CLASSES = {
    "arriving": "guest tourist",
    "building": "house hotel castle church museum school theater hospital library restaurant factory",
    "buildable": "boat ship house castle bridge hotel shelf",
    "closable": "door window",
    "cooked": "potato egg sausage rice meat soup",
    "dog": "dog",
    "flat": "blanket knife key pencil picture camera gift umbrella",
    "game": "game",
    "home": "house apartment hotel castle village city farm",
    "openable": "letter box suitcase bag bottle gift umbrella",
    "playful": "child boy girl dog cat",
    "story": "story",
    "upright": "vase bottle cup plate basket candle lamp",
}

# can, must and so on: English, whether it is a full verb there (does she want to), German by person, may be negated.
MODAL_TABLE = """
    can - kann kannst kann können können, must - muss musst muss müssen müssen no,
    should - sollte solltest sollte sollten sollten, may - darf darfst darf dürfen dürfen no,
    want_to verb will willst will wollen wollen, would_like_to - möchte möchtest möchte möchten möchten,
    will - werde wirst wird werden werden, will - werde wirst wird werden werden"""
# What the present, the past and the future go with. Digits and number words are added by the grammar.
TIME_TABLES = {
    "present": """
        today heute, every_day jeden_Tag, every_morning jeden_Morgen, in_the_evening am_Abend, this_week diese_Woche,
        in_winter im_Winter, on_the_weekend am_Wochenende, now jetzt, every_week jede_Woche, in_summer im_Sommer,
        in_the_morning am_Morgen, at_night in_der_Nacht""",
    "past": """
        yesterday gestern, last_week letzte_Woche, last_year letztes_Jahr, last_summer letzten_Sommer,
        yesterday_evening gestern_Abend, this_morning heute_Morgen, last_month letzten_Monat""",
    "future": """
        tomorrow morgen, next_week nächste_Woche, next_month nächsten_Monat, next_year nächstes_Jahr,
        tomorrow_evening morgen_Abend, tonight heute_Abend, soon bald, tomorrow_afternoon morgen_Nachmittag""",
}
WEEKDAYS = """
    Monday Montag, Tuesday Dienstag, Wednesday Mittwoch, Thursday Donnerstag, Friday Freitag, Saturday Samstag,
    Sunday Sonntag"""
MONTHS = """
    January Januar, February Februar, March März, April April, May Mai, June Juni, July Juli, August August,
    September September, October Oktober, November November, December Dezember"""
NUMBERS = """
    two zwei, three drei, four vier, five fünf, six sechs, seven sieben, eight acht, nine neun, ten zehn, eleven elf,
    twelve zwölf"""
FREQUENCIES = "always immer, often oft, usually meistens, sometimes manchmal, rarely selten, never nie"
MANNERS = """
    carefully vorsichtig, quickly schnell, slowly langsam, quietly leise, patiently geduldig, secretly heimlich,
    alone allein, calmly in_Ruhe"""
VEHICLE_MANNERS = "by_train mit_dem_Zug, by_bus mit_dem_Bus, by_ship mit_dem_Schiff, by_car mit_dem_Auto"

# Words that "my" or "Anna's" suits among those for persons, and relatives one has one of.
ACQUAINTANCES = "friend neighbor colleague teacher doctor boss guest lawyer driver gardener student child chef"
SINGLE_RELATIVES = "mother father"

NAMES = "Anna Maria Julia Sophie Laura Emma Peter Paul Thomas Felix Lukas Jonas Martin David Mrs_Weber Mr_Weber"
# Towns and countries; Switzerland and Turkey keep their article in German.
CITIES = """
    Berlin Berlin, Hamburg Hamburg, Vienna Wien, Munich München, Cologne Köln, Zurich Zürich, Rome Rom, Paris Paris,
    London London, Italy Italien, France Frankreich, Spain Spanien, Austria Österreich, Greece Griechenland,
    Switzerland die_Schweiz, Turkey die_Türkei"""
