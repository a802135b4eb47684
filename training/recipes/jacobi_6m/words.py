"""The words that problems are made of."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split(",") if phrase.strip())


WOMEN = _split(
    """Ada Agnes Alice Alma Amara Amelia Amina Anita Anna Astrid Aurora Ayla Beatrice Bella Bianca Bridget Camila Carla
    Carmen Cecilia Celine Chiara Chloe Clara Claire Dalia Daphne Diana Dora Edith Elena Elisa Ella Elsa Emilia Emma
    Erika Esther Eva Evelyn Faith Fatima Fiona Flora Freya Gemma Gloria Grace Greta Hana Hannah Harriet Hazel Helena
    Hilda Ida Imani Ingrid Irene Iris Isabel Ivy Jana Jasmine Jenna Joanna Josie Julia June Karin Kavya Keiko Kira
    Laila Lara Laura Leah Lena Lily Linda Lola Lucia Luna Mabel Maeve Malika Margot Maria Marina Marta Maya Mei Mila
    Mina Mira Miriam Molly Mona Nadia Naomi Nina Nora Olga Olive Olivia Paloma Paula Petra Phoebe Pia Priya Quinn
    Rachel Rania Rita Rosa Ruby Ruth Sabine Sally Sara Selma Silvia Sofia Stella Susan Talia Tamara Tara Tessa Thea
    Tina Uma Ursula Vera Viola Wanda Willa Yara Yasmin Yuki Zara Zelda Zoe"""
)
MEN = _split(
    """Aaron Abel Adam Adrian Ahmed Alan Albert Alex Amir Andre Anton Arjun Arthur Axel Barry Basil Ben Boris Bruno
    Caleb Carl Carlos Cedric Chen Colin Conrad Cyrus Damian Daniel Dario David Dennis Diego Dylan Edgar Edwin
    Elias Emil Enzo Eric Ernest Ethan Evan Felix Fergus Finn Floyd Frank Fred Gabriel George Gilbert Gordon Gregor
    Gustav Hamid Harold Harry Hassan Hector Henry Hugo Ian Igor Isaac Ivan Jack Jacob Jamal James Jared Jason
    Javier Joel John Jonas Jorge Joseph Julian Karim Keith Kenji Kevin Kofi Lars Leo Leon Liam Louis Lucas Luis
    Malik Marco Mario Mark Martin Mateo Max Miguel Milo Nathan Neil Niels Noah Oleg Omar Oscar Otto Owen Pablo
    Patrick Paul Pavel Peter Philip Pierre Rafael Raj Ralph Ravi Robert Roman Rory Ruben Samir Samuel Sean Sergio
    Simon Stefan Steven Tariq Theo Thomas Tobias Tom Tyler Umar Victor Viktor Vincent Walter Warren Wesley William
    Xavier Yusuf Zane"""
)

ITEMS = _phrases(
    """apples, pears, plums, peaches, cherries, lemons, oranges, melons, mangoes, figs, grapes, walnuts, almonds,
    chestnuts, potatoes, carrots, onions, tomatoes, peppers, pumpkins, cabbages, radishes, beans, mushrooms, eggs,
    cookies, muffins, pancakes, waffles, biscuits, cupcakes, pies, tarts, bagels, pretzels, sandwiches, candies,
    lollipops, chocolates, marbles, stamps, coins, medals, badges, buttons, beads, ribbons, shells, pebbles,
    crystals, feathers, leaves, flowers, roses, tulips, daisies, lilies, seeds, bulbs, cards, stickers, posters,
    photos, postcards, letters, envelopes, notebooks, books, magazines, comics, novels, maps, pencils, pens,
    crayons, markers, brushes, erasers, rulers, folders, candles, lamps, lanterns, bottles, jars, cups, mugs,
    plates, bowls, spoons, forks, towels, blankets, pillows, scarves, gloves, socks, shirts, hats, caps, belts,
    shoes, boots, tickets, tokens, puzzles, dolls, robots, kites, balloons, balls, drums, whistles, bells, magnets,
    batteries, screws, nails, bolts, bricks, tiles, planks, ropes, keys, locks, chains, fishes, turtles, rabbits,
    ducklings, chickens, goats, lambs, ponies, kittens, puppies, parrots, canaries, snails, worms, crickets,
    apricots, bananas, blueberries, strawberries, raspberries, coconuts, cucumbers, turnips, parsnips, avocados,
    olives, pistachios, hazelnuts, dumplings, doughnuts, croissants, brownies, caramels, noodles, sausages,
    bracelets, necklaces, earrings, brooches, pendants, goblets, kettles, saucers, teapots, vases, cushions,
    curtains, carpets, umbrellas, wallets, purses, sandals, slippers, jackets, sweaters, trousers, aprons, helmets,
    backpacks, telescopes, compasses, lenses, mirrors, clocks, watches, calendars, violins, trumpets, guitars,
    flutes, harmonicas, tambourines, figurines, statues, sculptures, paintings, drawings, blueprints, diaries,
    dictionaries, journals, pamphlets, scrolls, bookmarks, paperclips, staplers, highlighters, thermometers,
    calculators, flashlights, hammers, wrenches, screwdrivers, shovels, buckets, sponges, broomsticks, butterflies,
    ladybugs, dragonflies, hamsters, hedgehogs, squirrels, pigeons, sparrows, goldfish, seahorses, starfish,
    lobsters, oysters, pinecones, acorns, mosses, orchids, sunflowers, lavenders, cactuses, saplings"""
)
ADJECTIVES = _split(
    """ancient bright broken carved cheap clean colourful curious cracked crimson delicate dusty elegant emerald
    enormous expensive faded fancy foreign fragile fresh frozen gentle genuine giant gleaming golden handmade heavy
    hollow huge imported ivory large lavender little local lovely lucky magic marvellous miniature modest mysterious
    narrow noisy ordinary ornate painted pale patterned perfect plain polished precious pretty quiet rare remarkable
    rough royal rusty scarlet secret shiny silent silver simple slender small smooth soft special spotted strange
    striped sturdy tiny tidy turquoise unusual useful valuable velvet violet wonderful wooden worn"""
)
CONTAINERS = _phrases(
    """basket, box, drawer, jar, bag, crate, chest, cupboard, shed, garage, backpack, trunk, bucket, cabinet, tray,
    suitcase, barrel, locker, pouch, sack, case, carton, tin, closet"""
)
PLURAL = {
    "basket": "baskets", "box": "boxes", "jar": "jars", "bag": "bags", "crate": "crates", "bucket": "buckets",
    "tray": "trays", "pouch": "pouches", "sack": "sacks", "carton": "cartons", "tin": "tins", "case": "cases",
}  # fmt: skip
TIMES = _phrases(
    """on Monday, on Tuesday, on Wednesday, on Thursday, on Friday, on Saturday, on Sunday, in the morning,
    in the afternoon, in the evening, after lunch, after dinner, before breakfast, at noon, at night, last week,
    the next day, two days later, during the break, after school, after work, at the weekend, in spring, in summer,
    in autumn, in winter, in January, in March, in June, in August, in October, in December, on the way home,
    at the market, at the fair, at the station, by the river, near the harbour, in the village, at the festival"""
)
FRIENDS = _phrases(
    """friends, cousins, neighbours, teachers, sisters, brothers, children, classmates, nephews, nieces, visitors,
    workers, players, guests, helpers, students"""
)
SINGULAR = {
    "friends": "friend", "cousins": "cousin", "neighbours": "neighbour", "teachers": "teacher", "sisters": "sister",
    "brothers": "brother", "children": "child", "classmates": "classmate", "nephews": "nephew", "nieces": "niece",
    "visitors": "visitor", "workers": "worker", "players": "player", "guests": "guest", "helpers": "helper",
    "students": "student",
}  # fmt: skip

# Tables: the noun of a row, text columns with the values they take, numeric columns with their range.
TABLES = _phrases(
    """orders, products, customers, employees, students, courses, flights, hotels, movies, songs, albums, books, cars,
    trucks, houses, rooms, patients, doctors, visits, teams, matches, players, recipes, shops, sales, invoices,
    payments, accounts, loans, tickets, events, concerts, museums, paintings, cities, rivers, mountains, farms, animals,
    plants, machines, sensors, repairs, shipments, suppliers, projects, tasks, meetings, members, bookings, restaurants,
    meals, trains, stations, bridges, schools, games, phones, laptops, parcels"""
)
TEXT_COLUMNS = {
    "city": _split(
        """Rome Paris Berlin Madrid Lisbon Vienna Prague Oslo Dublin Athens Cairo Tokyo Lima Delhi Boston Quito
        Seville Naples Munich Zurich Geneva Warsaw Krakow Budapest Bucharest Istanbul Nairobi Lagos Mumbai
        Bangkok Sydney Toronto Chicago Houston Montreal Santiago"""
    ),
    "country": _split(
        """Italy France Spain Norway Greece Egypt Japan Peru India Brazil Canada Kenya Poland Chile Ghana Cuba
        Portugal Sweden Finland Denmark Turkey Morocco Nigeria Vietnam Thailand Mexico Argentina Colombia
        Iceland Ireland Hungary Romania"""
    ),
    "color": _split(
        """red blue green black white yellow purple orange brown silver gold pink violet maroon beige ivory teal
        crimson"""
    ),
    "brand": _split(
        """Acme Nova Zenith Orion Vertex Lumen Cobalt Apex Quasar Delta Solaris Titan Aurora Bluebird Cascade
        Dynamo Eclipse Frontier Galaxy Harmony Infinity Keystone"""
    ),
    "status": _split(
        """open closed pending active paused done failed new late paid approved rejected cancelled delivered
        delayed shipped archived scheduled confirmed expired"""
    ),
    "category": _split(
        """basic premium standard classic modern budget luxury family sport travel professional industrial outdoor
        digital organic vintage portable seasonal exclusive discounted"""
    ),
    "genre": _split(
        """jazz rock drama comedy horror opera folk thriller fantasy history mystery romance adventure documentary
        musical poetry biography western classical electronic"""
    ),
    "material": _split(
        """wood steel glass cotton leather paper stone plastic copper marble bronze ceramic concrete bamboo canvas
        rubber velvet wool silk granite"""
    ),
    "season": _split("spring summer autumn winter"),
    "weekday": _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "department": _split(
        """sales finance legal research support design logistics marketing security training engineering production
        quality maintenance accounting planning procurement communications"""
    ),
    "owner": _split(
        """Miller Garcia Novak Kim Silva Rossi Schmidt Tanaka Kumar Lopez Jensen Dubois Andersen Bianchi Castillo
        Fernandez Hoffmann Ivanov Kowalski Larsen Moreau Nakamura Olsen Petrov Romero Santos Weber Yamada
        Zimmermann"""
    ),
    "manager": _split(
        """Baker Carter Fisher Mason Porter Turner Walker Weaver Cooper Hunter Bennett Coleman Dawson Ellis Foster
        Griffin Harper Jenkins Lawson Morgan Nelson Palmer Reynolds Sanders Watson"""
    ),
    "language": _split(
        """English French German Spanish Italian Arabic Hindi Korean Dutch Swedish Portuguese Japanese Mandarin
        Turkish Polish Finnish Hungarian Swahili Bengali Norwegian"""
    ),
    "region": _split("north south east west coast valley island desert forest highland"),
    "level": _split("low medium high junior senior expert beginner advanced"),
    "supplier": _split(
        """Alpine Baltic Cedar Dorian Everest Falcon Granite Horizon Indigo Jupiter Kestrel Lighthouse Meridian
        Northwind Oakwood Pinnacle Redwood Silverline Tempest Umbra Vanguard Westgate"""
    ),
    "shape": _split("round square oval flat curved narrow wide tall"),
}  # fmt: skip
NUMBER_COLUMNS = {
    "price": (5, 95), "total": (10, 99), "quantity": (1, 40), "weight": (2, 90), "height": (10, 99), "length": (5, 80),
    "age": (5, 90), "score": (1, 99), "rating": (1, 10), "salary": (20, 99), "budget": (10, 95), "cost": (2, 90),
    "stock": (0, 80), "distance": (3, 99), "duration": (5, 90), "capacity": (10, 99), "speed": (20, 99),
    "pages": (20, 99), "points": (0, 60), "goals": (0, 30), "visitors": (5, 99), "seats": (4, 80), "floors": (1, 30),
    "discount": (0, 50), "tax": (1, 30), "width": (2, 60), "depth": (1, 50), "profit": (5, 95), "delay": (0, 60),
    "bonus": (1, 40), "temperature": (1, 40), "experience": (1, 35), "credits": (1, 12), "votes": (0, 99),
}  # fmt: skip
